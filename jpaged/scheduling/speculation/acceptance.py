"""How likely a draft is kept, as measured so far."""

from __future__ import annotations

from collections.abc import Sequence

MEMORY = 256.0
"""Tries that are remembered; older ones fade."""


class Acceptance:
    """Estimates, for each class of drafts, how likely the next one is kept.

    It counts outcomes, not seconds: a run of the same requests makes the same drafts.

    Args:
        expected: what is taken for each class before anything was measured, in (0, 1).
        weight: number of tries that this counts as.
    """

    def __init__(self, expected: Sequence[float], weight: float) -> None:
        self._kept = [rate * weight for rate in expected]
        self._tried = [weight] * len(expected)

    def note(self, kind: int, *, kept: int, lost: int) -> None:
        """Take note of drafts of a class that were kept and lost."""
        tried = self._tried[kind] + kept + lost
        fade = min(1.0, MEMORY / tried)
        self._tried[kind] = tried * fade
        self._kept[kind] = (self._kept[kind] + kept) * fade

    def data(self) -> list[list[float]]:
        """Return the drafts of each class that were kept and that were tried, as they count now."""
        return [self._kept.copy(), self._tried.copy()]

    def load(self, data: Sequence[Sequence[float]]) -> None:
        """Take over what `data` returned."""
        kept, tried = data
        self._kept, self._tried = list(kept), list(tried)

    def rate(self, kind: int) -> float:
        """Return the share of a class's drafts that are kept."""
        return self._kept[kind] / self._tried[kind]
