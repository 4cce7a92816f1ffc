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
    """

    token: float
    verifying: float
    draft: float = 0.0


def best_length(rates: Sequence[float], costs: StepCosts, *, batch: int, verifies: bool) -> int:
    """Return how many drafts of a sequence make the batch's tokens cheapest; 0 = none pays.

    Drafts are kept up to the first that is lost, so the i-th brings a token with the product of the first i rates.

    Args:
        rates: how likely each draft is kept, given that those before it are; there are no more drafts than these.
        batch: number of sequences in the step, one token each.
        verifies: whether the step verifies drafts of another sequence already.
    """
    plain = 1 + costs.token * (batch - 1)
    best, least = 0, plain / batch
    cost = plain + (0.0 if verifies else costs.verifying)
    tokens, reached = float(batch), 1.0
    for length, rate in enumerate(rates, 1):
        reached *= rate
        tokens += reached
        cost += costs.token + costs.draft
        if cost / tokens < least:
            best, least = length, cost / tokens
        elif reached < 1e-3:
            break
    return best
