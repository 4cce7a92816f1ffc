"""Drafts: the interface that the scheduler uses, and how many drafts are worth their cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from jpaged.scheduling.request import Request, Sequence


@dataclass(frozen=True)
class StepCosts:
    """The cost of a step by its number of tokens, relative to the step of one token.

    Attributes:
        token: cost of one token more.
        verifying: cost of verifying drafts at all: another program, and the wait for the host between two steps.
        draft: cost of making one draft on the device; 0 where the host looks it up.
        block: cost of making all drafts of a step in one pass on the device; 0 where each is made by itself.
        tile: cost of going beyond each `tile_tokens` tokens, where products take so many rows in about the same time.
    """

    token: float
    verifying: float
    draft: float = 0.0
    block: float = 0.0
    tile: float = 0.0
    tile_tokens: int = 8

    def step(self, tokens: int) -> float:
        """Return the cost of a step of so many tokens, none of which is a draft."""
        return 1 + self.token * (tokens - 1) + self.tile * ((tokens - 1) // self.tile_tokens)


def best_length(rates: Seq[float], costs: StepCosts, *, batch: int, verifies: bool) -> int:
    """Return how many drafts of a sequence make the batch's tokens cheapest; 0 = none pays.

    Drafts are kept up to the first that is lost, so the i-th brings a token with the product of the first i rates.

    Args:
        rates: how likely each draft is kept, given that those before it are; there are no more drafts than these.
        batch: number of sequences in the step, one token each.
        verifies: whether the step verifies drafts of another sequence already.
    """
    best, least = 0, costs.step(batch) / batch
    verifying = 0.0 if verifies else costs.verifying + costs.block
    tokens, reached = float(batch), 1.0
    for length, rate in enumerate(rates, 1):
        reached *= rate
        tokens += reached
        cost = costs.step(batch + length) + verifying + costs.draft * length
        if cost / tokens < least:
            best, least = length, cost / tokens
        elif reached < 1e-3:
            break
    return best


MEMORY = 256.0
"""Tries that are remembered; older ones fade."""


class Acceptance:
    """Estimates, for each class of drafts, how likely the next one is kept.

    It counts outcomes, not seconds: a run of the same requests makes the same drafts.

    Args:
        expected: the estimate of each class before anything was measured, in (0, 1).
        weight: number of tries that this counts as.
    """

    def __init__(self, expected: Seq[float], weight: float) -> None:
        self._kept = [rate * weight for rate in expected]
        self._tried = [weight] * len(expected)

    def note(self, kind: int, *, kept: int, lost: int) -> None:
        """Count drafts of a class that were kept and lost."""
        tried = self._tried[kind] + kept + lost
        fade = min(1.0, MEMORY / tried)
        self._tried[kind] = tried * fade
        self._kept[kind] = (self._kept[kind] + kept) * fade

    def data(self) -> list[list[float]]:
        """Return the drafts of each class that were kept and that were tried, as they count now."""
        return [self._kept.copy(), self._tried.copy()]

    def load(self, data: Seq[Seq[float]]) -> None:
        """Restore the estimates that `data` returned."""
        kept, tried = data
        self._kept, self._tried = list(kept), list(tried)

    def rate(self, kind: int) -> float:
        """Return the share of a class's drafts that are kept."""
        return self._kept[kind] / self._tried[kind]


class Speculation(ABC):
    """Makes drafts of a sequence's next tokens and learns which of them were kept.

    Args:
        tokens: most drafts of a sequence in one step.

    Attributes:
        num_drafts: how often drafts of a sequence were verified.
        num_drafted, num_accepted: drafts that were verified, and those of them that were kept, a token more each.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.num_drafts = 0
        self.num_drafted = 0
        self.num_accepted = 0

    def worth_waiting(self, request: Request, seq: Sequence, most: int, *, batch: int) -> bool:
        """Tell, when the host has got a token of the sequence, whether the next one should be awaited so that drafts
        can be made after it.

        Args:
            most: most drafts that a step has room for.
            batch: number of sequences that run.
        """
        most = min(most, self.tokens, request.max_total_tokens - len(seq.token_ids) - 1)
        return request.beam is None and most > 0 and self._worth_waiting(seq, most, batch)

    def draft(self, request: Request, seq: Sequence, most: int, *, batch: int, verifies: bool) -> tuple[int, ...]:
        """Return drafts of the tokens after the sequence's newest, which the host has; none where they do not pay.

        Args:
            most: most drafts that the step has room for.
            batch: number of sequences that run.
            verifies: whether the step verifies drafts of another sequence already.
        """
        # The last token that a request may have is drawn in any case, and nothing is drawn after it.
        most = min(most, self.tokens, request.max_total_tokens - len(seq.token_ids) - 1)
        if most < 1 or request.beam is not None:
            return ()
        return self._draft(seq, most, batch=batch, verifies=verifies)

    def verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """Count the drafts of a sequence, `drafted` of them, of which the first `accepted` were kept."""
        self.num_drafts += 1
        self.num_drafted += drafted
        self.num_accepted += accepted

    def data(self) -> dict[str, Any]:
        """Return its counts and estimates as plain data."""
        return {"drafts": self.num_drafts, "drafted": self.num_drafted, "accepted": self.num_accepted}

    def load(self, data: Mapping[str, Any]) -> None:
        """Restore the counts and estimates that another of its kind returned from `data`."""
        self.num_drafts, self.num_drafted, self.num_accepted = data["drafts"], data["drafted"], data["accepted"]

    @abstractmethod
    def took(self, seq: Sequence) -> None:
        """Learn from the newest token of a sequence, whether it was drafted or not."""

    @abstractmethod
    def _worth_waiting(self, seq: Sequence, most: int, batch: int) -> bool: ...

    @abstractmethod
    def _draft(self, seq: Sequence, most: int, *, batch: int, verifies: bool) -> tuple[int, ...]: ...
