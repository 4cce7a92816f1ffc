"""What the scheduler asks about drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from jpaged.scheduling.request import Request, Sequence


class Speculation(ABC):
    """Makes drafts of a sequence's next tokens and learns from what became of them.

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
        can be made behind it.

        Args:
            most: most drafts that a step has room for.
            batch: number of sequences that run.
        """
        most = min(most, self.tokens, request.max_total_tokens - len(seq.token_ids) - 1)
        return request.beam is None and most > 0 and self._worth_waiting(seq, most, batch)

    def draft(self, request: Request, seq: Sequence, most: int, *, batch: int, verifies: bool) -> tuple[int, ...]:
        """Return drafts of the tokens behind the sequence's newest, which the host has; none where they do not pay.

        Args:
            most: most drafts that the step has room for.
            batch: number of sequences that run.
            verifies: whether the step verifies drafts of another sequence already.
        """
        # The last token that a request may have is drawn in any case, and nothing is drawn behind it.
        most = min(most, self.tokens, request.max_total_tokens - len(seq.token_ids) - 1)
        if most < 1 or request.beam is not None:
            return ()
        return self._draft(seq, most, batch=batch, verifies=verifies)

    def verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """Take note that of `drafted` drafts of a sequence the first `accepted` were kept."""
        self.num_drafts += 1
        self.num_drafted += drafted
        self.num_accepted += accepted

    def data(self) -> dict[str, Any]:
        """Return what was counted and learnt, as plain data."""
        return {"drafts": self.num_drafts, "drafted": self.num_drafted, "accepted": self.num_accepted}

    def load(self, data: Mapping[str, Any]) -> None:
        """Take over what another of its kind had counted and learnt."""
        self.num_drafts, self.num_drafted, self.num_accepted = data["drafts"], data["drafted"], data["accepted"]

    @abstractmethod
    def took(self, seq: Sequence) -> None:
        """Take note of the newest token of a sequence, drafted before or not."""

    @abstractmethod
    def _worth_waiting(self, seq: Sequence, most: int, batch: int) -> bool: ...

    @abstractmethod
    def _draft(self, seq: Sequence, most: int, *, batch: int, verifies: bool) -> tuple[int, ...]: ...
