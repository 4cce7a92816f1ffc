"""Examples at the end of each command's help; a test parses all of them."""

from __future__ import annotations

_EXAMPLES: dict[str, tuple[str, ...]] = {
    "jpaged": (
        'jpaged generate "The capital of France is"',
        "jpaged serve smollm2-135m --max-model-len 1024",
        "jpaged plan --model llama-3.3-70b --device v6e-8",
    ),
    "generate": (
        'jpaged generate "Once upon a time" --max-tokens 40 --stream',
        'jpaged generate "Name a river." --n 3 --temperature 0.8 --seed 1 --memory',
        "jpaged generate --file prompts.txt --model Qwen/Qwen3-0.6B --quantization int8",
    ),
    "chat": (
        "jpaged chat",
        'jpaged chat --model Qwen/Qwen3-0.6B --system "Answer in one sentence." --temperature 0.7',
    ),
    "convert": (
        "jpaged convert smollm2-135m ./smollm2-orbax",
        "jpaged convert Qwen/Qwen3-0.6B ./qwen3-int8 --quantization int8",
    ),
    "quantize": (
        "jpaged quantize Qwen/Qwen3-0.6B --out ./qwen3-w4a16",
        "jpaged quantize Qwen/Qwen3-0.6B --out ./qwen3-awq --format awq --group-size 64",
    ),
    "compile": (
        "jpaged compile smollm2-135m --out ./programs --max-num-seqs 32",
        "jpaged compile smollm2-135m --device v5e-1 --out ./programs-v5e",
    ),
    "replay-step": ("jpaged replay-step steps/step-000042.jpaged",),
    "plan": (
        "jpaged plan --list",
        "jpaged plan --model llama-3.3-70b --device v6e-8 --context 8192 --concurrency 64",
    ),
    "serve": (
        "jpaged serve smollm2-135m --max-model-len 1024",
        "jpaged serve Qwen/Qwen3-0.6B --host 0.0.0.0 --api-key secret --tool-parser hermes",
        "jpaged serve smollm2-135m --state-dir state --save-every 30",
        "jpaged serve smollm2-135m --compiled-programs ./programs --max-num-seqs 32",
    ),
    "run-batch": ("jpaged run-batch in.jsonl out.jsonl --model smollm2-135m",),
    "eval": (
        "jpaged eval --tasks arc_easy --limit 100",
        "jpaged eval --model Qwen/Qwen3-0.6B --tasks gsm8k --num_fewshot 5 --apply_chat_template",
    ),
    "bench": ("jpaged bench throughput", "jpaged bench serve --rate 1 --rate 4"),
    "bench throughput": (
        "jpaged bench throughput --quick",
        "jpaged bench throughput --num-prompts 64 --max-num-seqs 64",
    ),
    "bench serve": (
        "jpaged bench serve --url http://127.0.0.1:8000 --rate 1 --rate 2 --num-requests 50 --out figures.json",
        "jpaged bench serve --prompts questions.jsonl --endpoint chat --limit-ttft 500 --limit-token 50",
    ),
}


def examples(command: str) -> str:
    r"""Return the examples of a command for its help; ``\b`` keeps their line breaks.

    Args:
        command: its name after ``jpaged``, or ``jpaged`` itself.
    """
    lines = _EXAMPLES[command]
    return "\n".join(["\b", "Example:" if len(lines) == 1 else "Examples:", *(f"  {line}" for line in lines)])
