"""Drafts that a program on the device draws before the step that verifies them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jpaged.scheduling.request import Sequence
from jpaged.scheduling.speculation.base import Acceptance, Speculation, StepCosts, best_length
from jpaged.scheduling.step import UNKNOWN

_EXPECTED, _WEIGHT = 0.7, 16.0
"""The share of drafts that is taken to be kept before any was made, and the number of drafts this counts as."""
_FIRST_PAUSE, _LONGEST_PAUSE = 128, 4096
"""Tokens until drafts that did not pay are tried again; each time in vain it is twice as many."""


class DeviceSpeculation(Speculation):
    """Says how many drafts the device makes of each sequence; which ones is known when the step runs.

    Only verified drafts show how many are kept. So where drafts do not pay, one is still tried after a pause.

    Args:
        tokens: most drafts of a sequence in one step.
        costs: cost of steps and drafts on this device.
    """

    def __init__(self, tokens: int, costs: StepCosts) -> None:
        super().__init__(tokens)
        self._costs = costs
        self._acceptance = Acceptance([_EXPECTED], _WEIGHT)
        self._pause, self._wait = _FIRST_PAUSE, 0

    def took(self, seq: Sequence) -> None:
        self._wait = max(0, self._wait - 1)

    def verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        super().verified(seq, drafted, accepted)
        self._acceptance.note(0, kept=accepted, lost=accepted < drafted)

    def data(self) -> dict[str, Any]:
        return {**super().data(), "acceptance": self._acceptance.data(), "pause": self._pause, "wait": self._wait}

    def load(self, data: Mapping[str, Any]) -> None:
        super().load(data)
        self._acceptance.load(data["acceptance"])
        self._pause, self._wait = data["pause"], data["wait"]

    def _worth_waiting(self, seq: Sequence, most: int, batch: int) -> bool:
        return self._wait == 0 or self._length(most, batch=batch, verifies=False) > 0

    def _draft(self, seq: Sequence, most: int, *, batch: int, verifies: bool) -> tuple[int, ...]:
        length = self._length(most, batch=batch, verifies=verifies)
        if length:
            self._pause = _FIRST_PAUSE
        elif self._wait == 0:
            length, self._wait = 1, self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return (UNKNOWN,) * length

    def _length(self, most: int, *, batch: int, verifies: bool) -> int:
        return best_length([self._acceptance.rate(0)] * most, self._costs, batch=batch, verifies=verifies)
