"""Makes up what a language model would say of beams: likely next tokens, so that beams fork and end as in life."""

from __future__ import annotations

import numpy as np

from jpaged.scheduling import ScheduledStep
from jpaged.scheduling.top_tokens import TopTokens

GAP = 24.0
"""Mean gap between a beam's most likely tokens, one after the other, over the mean of minus the best one's
log-probability: chosen so that two beams save what they do in the PagedAttention paper on Alpaca (figure 15)."""


class MadeUpRankings:
    """Draws rankings of tokens: minus the best token's log-probability and the gaps behind it are exponential.

    Args:
        gap: see `GAP`. Where it is wide a beam's own best token beats other beams' second, so that beams live long and
            share little; where it is narrow they fork from one another and share nearly all.
    """

    def __init__(self, seed: int, gap: float = GAP) -> None:
        self._rng = np.random.default_rng(seed)
        self._gap = gap

    def of(self, step: ScheduledStep) -> TopTokens | None:
        """Return the rankings of a step's samples, None where no request asks for any."""
        most = step.num_top
        if not most:
            return None
        rows = len(step.samples)
        logprobs = _logprobs(self._rng, rows, most, self._gap)
        tokens = np.broadcast_to(np.arange(most), (rows, most))
        return TopTokens(np.ones(rows, int), tokens, logprobs)


def copied_share(width: int, *, seed: int = 0, steps: int = 400, gap: float = GAP) -> float:
    """Return the share of a request's beams that go on from another one's tokens in a step, found by drawing."""
    rng = np.random.default_rng(seed)
    scores, copied = np.zeros(width), 0
    for _ in range(steps):
        candidates = scores[:, None] + _logprobs(rng, width, 2 * width, gap)
        best = np.argsort(-candidates, axis=None)[:width]
        copied += width - len(set((best // (2 * width)).tolist()))
        scores = np.sort(candidates, axis=None)[::-1][:width].copy()
        scores -= scores[0]
    return copied / (steps * width)


def _logprobs(rng: np.random.Generator, rows: int, most: int, gap: float) -> np.ndarray:
    gaps = rng.exponential(1.0, (rows, most))
    gaps[:, 1:] *= gap
    return -np.cumsum(gaps, axis=1)
