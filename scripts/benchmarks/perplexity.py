"""Measures what quantised weights and KV cost in quality: perplexity of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jpaged import LLM, SamplingParams
from scripts.cases import Rows

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


def perplexities(
    text: Path,
    model: str = "smollm2-135m",
    tokens: int = 40 * WINDOW,
    only: list[str] = list(VARIANTS),  # noqa: B006 (never changed)
) -> Rows:
    """Perplexity of a text file in windows of 512 tokens, bytes of weights and KV, for each kind of weights and KV."""
    written = text.read_text(encoding="utf-8")[: 16 * tokens]  # more characters than so many tokens have
    rows: Rows = []
    for name in only:
        llm = LLM(model, **{"dtype": "float32", "max_model_len": 2 * WINDOW, **VARIANTS[name]})
        value = perplexity(llm, llm.tokenizer.encode(written)[:tokens])
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))
        kv = sum(group.block_bytes for group in llm.memory_report().groups) / llm.config.block_size
        base = rows[0]["perplexity"] if rows else value
        row = {"variant": name, "perplexity": value, "against the first": value / base - 1}
        rows.append(row | {"weights MiB": weights / 2**20, "KV bytes a token": kv})
        llm.close()
    return rows
