"""Measures what quantised weights and KV cost in quality: perplexity of a text, beside that of float32.

    python -m scripts.benchmarks.perplexity TEXT.txt [--model smollm2-135m] [--tokens 20480] [--only int8 int4]

Each variant is an engine of its own; the text is cut into windows of 512 tokens. Prints a Markdown table: perplexity,
its distance from float32, bytes of the weights and of a token's KV.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jpaged import LLM, SamplingParams

WINDOW = 512
"""Tokens of a prompt: predictions see at most this many minus one."""


def perplexity(llm: LLM, token_ids: Sequence[int], window: int = WINDOW) -> float:
    """Return ``exp`` of the mean negative log-likelihood of every token but the first of each window.

    Raises:
        ValueError: there is no token to predict, or a window does not fit max_model_len.
    """
    windows = [list(token_ids[start : start + window]) for start in range(0, len(token_ids), window)]
    windows = [ids for ids in windows if len(ids) > 1]
    if not windows:
        raise ValueError(f"token_ids has {len(token_ids)} tokens: window={window} leaves nothing to predict")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in windows], params, use_tqdm=False)
    logprobs = []
    for ids, output in zip(windows, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, ranked in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
            assert ranked is not None
            logprobs.append(ranked[token].logprob)
    return math.exp(-sum(logprobs) / len(logprobs))


VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "gguf": {"quantization": "gguf"},
    "fp8": {"quantization": "fp8"},
    "bfloat16 KV": {"kv_cache_dtype": "bfloat16"},
    "fp8 KV": {"kv_cache_dtype": "fp8"},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "gguf, int8 KV": {"quantization": "gguf", "kv_cache_dtype": "int8"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=40 * WINDOW)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    baseline = None
    print("| variant | perplexity | against the first | weights, MiB | KV of a token, bytes |\n|---|---|---|---|---|")
    for name in args.only:
        llm = LLM(args.model, **{"dtype": "float32", "max_model_len": 2 * WINDOW, **VARIANTS[name]})
        value = perplexity(llm, llm.tokenizer.encode(text)[: args.tokens])
        baseline = baseline or value
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))
        report = llm.memory_report()
        kv = sum(group.block_bytes for group in report.groups) / llm.config.block_size
        print(f"| {name} | {value:.4f} | {value / baseline - 1:+.2%} | {weights / 2**20:.0f} | {kv:.0f} |", flush=True)


if __name__ == "__main__":
    main()
