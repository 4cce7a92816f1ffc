"""Draws tokens of a tiny model, with the engine's log-probabilities of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jpaged import LLM, SamplingParams

SETTINGS = {"dtype": "float32", "max_model_len": 72, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64}
SAMPLED = SamplingParams(temperature=1.0, seed=4, max_tokens=24, ignore_eos=True, logprobs=0)
_RNG = np.random.default_rng(3)
PROMPTS = [_RNG.integers(3, 211, n).tolist() for n in (5, 23, 2, 40)]


class Rollout(NamedTuple):
    """Holds sequences padded to one length.

    Attributes:
        tokens: prompts and what was drawn after them.
        mask: which are a sequence's.
        is_drawn: which were drawn.
        engine: the engine's log-probabilities of those; 0 elsewhere.
    """

    tokens: Int[np.ndarray, "batch tokens"]
    mask: Bool[np.ndarray, "batch tokens"]
    is_drawn: Bool[np.ndarray, "batch tokens"]
    engine: Float[np.ndarray, "batch tokens"]


def rolled_out(llm: LLM, left: bool = False) -> Rollout:
    """Draw after `PROMPTS`; padding is behind the sequences or, with `left`, before them."""
    rows = []
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], SAMPLED, use_tqdm=False):
        answer = output.outputs[0]
        scores = [of[token].logprob for token, of in zip(answer.token_ids, answer.logprobs, strict=True)]
        rows.append((output.prompt_token_ids, list(answer.token_ids), scores))
    width = max(len(prompt) + len(drawn) for prompt, drawn, _ in rows)
    tokens, engine = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.float32)
    mask, is_drawn = np.zeros((2, len(rows), width), bool)
    for row, (prompt, drawn, scores) in enumerate(rows):
        begin = width - len(prompt) - len(drawn) if left else 0
        first, end = begin + len(prompt), begin + len(prompt) + len(drawn)
        tokens[row, begin:end], mask[row, begin:end] = [*prompt, *drawn], True
        engine[row, first:end], is_drawn[row, first:end] = scores, True
    return Rollout(tokens, mask, is_drawn, engine)
