"""Serves conversations turn by turn with one engine in its own environment, for `scripts.benchmarks.several_turns`.

    python several_turns.py NAME MODEL DTYPE KV_BYTES WORK.json OUT.json

WORK.json has `warm` and `talks`, each a list of conversations, which are lists of turns of token ids, and `answer`, the
tokens of each answer. All conversations send a turn at once; its prompt is what was said before, and the turn. OUT.json
gets for each turn its seconds, prompt tokens, those found in the prefix cache, and the requests' seconds to the first
token. It imports nothing of jpaged but for its engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

BUDGET = 512
Answers = list[tuple[list[int], int, float]]
"""Tokens of each answer, prompt tokens found, and seconds to the first token."""


def _settings(dtype: str, kv_bytes: int, context: int, sequences: int) -> dict[str, Any]:
    """Return the settings that both engines have under one name."""
    return {
        "dtype": dtype,
        "kv_cache_memory_bytes": kv_bytes,
        "max_model_len": context,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": BUDGET,
    }


def jpaged(model: str, dtype: str, kv_bytes: int, context: int, tokens: int, sequences: int) -> Any:
    from jpaged import LLM, SamplingParams

    llm = LLM(model, **_settings(dtype, kv_bytes, context, sequences))
    llm.warmup(use_tqdm=False)  # as vLLM does when it starts
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)

    def run(prompts: list[list[int]]) -> Answers:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [
            (
                list(one.outputs[0].token_ids),
                one.num_cached_tokens,
                one.metrics.first_token_time - one.metrics.arrival_time,
            )
            for one in outputs
        ]

    return run


def vllm(model: str, dtype: str, kv_bytes: int, context: int, tokens: int, sequences: int) -> Any:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        **_settings(dtype, kv_bytes, context, sequences),
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        disable_log_stats=False,
    )
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)

    def run(prompts: list[list[int]]) -> Answers:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [
            (list(one.outputs[0].token_ids), one.num_cached_tokens, one.metrics.first_token_latency) for one in outputs
        ]

    return run


def served(run: Any, talks: list[list[list[int]]]) -> list[dict[str, Any]]:
    """Serve conversations turn by turn and return each turn's figures."""
    said: list[list[int]] = [[] for _ in talks]
    turns = []
    for number in range(len(talks[0])):
        prompts = [before + talk[number] for before, talk in zip(said, talks, strict=True)]
        start = time.perf_counter()
        answers = run(prompts)
        turns.append(
            {
                "seconds": time.perf_counter() - start,
                "prompt": sum(map(len, prompts)),
                "found": sum(found for _, found, _ in answers),
                "first": [first for _, _, first in answers],
                "answers": [answer for answer, _, _ in answers],
            }
        )
        said = [prompt + answer for prompt, (answer, _, _) in zip(prompts, answers, strict=True)]
    return turns


def main() -> None:
    name, model, dtype, kv_bytes, work, out = sys.argv[1:]
    asked = json.loads(Path(work).read_text())
    tokens = asked["answer"]
    longest = max(sum(map(len, talk)) + tokens * len(talk) for talk in asked["talks"])
    run = {"jpaged": jpaged, "vllm": vllm}[name](
        model, dtype, int(kv_bytes), -(-longest // 256) * 256, tokens, len(asked["talks"])
    )
    served(run, asked["warm"])
    Path(out).write_text(json.dumps(served(run, asked["talks"])))


if __name__ == "__main__":
    main()
