"""How many drafts are worth their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepCosts:
    """What a step costs by its number of tokens; the step of one token costs 1.

    Attributes:
        token: cost of one token more.
        verifying: cost of verifying drafts at all: another program, and the wait for the host between two steps.
        draft: cost of making one draft on the device; 0 where the host looks it up.
        tile: cost of going beyond each `tile_tokens` tokens, where products take so many rows in about the same time.
    """

    token: float
    verifying: float
    draft: float = 0.0
    tile: float = 0.0
    tile_tokens: int = 8

    def step(self, tokens: int) -> float:
        """Return the cost of a step of so many tokens, none of which is a draft."""
        return 1 + self.token * (tokens - 1) + self.tile * ((tokens - 1) // self.tile_tokens)


def best_length(rates: Sequence[float], costs: StepCosts, *, batch: int, verifies: bool) -> int:
    """Return how many drafts of a sequence make the batch's tokens cheapest; 0 = none pays.

    Drafts are kept up to the first that is lost, so the i-th brings a token with the product of the first i rates.

    Args:
        rates: how likely each draft is kept, given that those before it are; there are no more drafts than these.
        batch: number of sequences in the step, one token each.
        verifies: whether the step verifies drafts of another sequence already.
    """
    best, least = 0, costs.step(batch) / batch
    beside = 0.0 if verifies else costs.verifying
    tokens, reached = float(batch), 1.0
    for length, rate in enumerate(rates, 1):
        reached *= rate
        tokens += reached
        cost = costs.step(batch + length) + beside + costs.draft * length
        if cost / tokens < least:
            best, least = length, cost / tokens
        elif reached < 1e-3:
            break
    return best
