"""Measures how well a model predicts a text, through the engine: weights, products and KV as they serve requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jpaged.llm import LLM
from jpaged.sampling_params import SamplingParams

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
