"""Plans the encoding of an image that costs more than a step: some of its encoder's layers in each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from jpaged.memory import StoredImage
from jpaged.scheduling.inputs import PromptItem
from jpaged.scheduling.step import Encode, EncodePart


class HalfEncoded:
    """Follows an image that is encoded over several steps. The device keeps its state from step to step.

    Budgets decide where it is cut. Features do not depend on the cuts, as the device runs each round of layers alike.

    Args:
        stored: its place in the pool. Once no request holds that, the image is forgotten; a later one begins it again.
        cost: tokens of a step's budget that all of it takes.
        rounds: layers of each round.
        sure: tokens that a step is sure to have: a round counts as no more, since it would never be begun.
    """

    def __init__(self, image: PromptItem, stored: StoredImage, cost: float, rounds: Sequence[int], sure: int) -> None:
        self.stored = stored
        self._image = image
        self._sure = sure
        self._costs = [cost * layers / sum(rounds) for layers in accumulate(rounds, initial=0)]
        self._done = self._planned = 0

    @property
    def is_held(self) -> bool:
        """Tell whether a request still holds the image."""
        return self.stored.users > 0 and not self.stored.is_torn

    @property
    def is_whole(self) -> bool:
        """Tell whether the pool has all of its features after the step that is being planned."""
        return self._planned == self._last

    @property
    def _last(self) -> int:
        return len(self._costs) - 1

    def extend(self, budget: int) -> int:
        """Plan as many rounds as a budget has tokens for; return how many tokens they take."""
        first = self._planned
        while not self.is_whole and self._cost(first, self._planned + 1) <= budget:
            self._planned += 1
        if self._planned == first and not self.is_whole and self._sure <= budget:
            self._planned += 1
        return min(self._cost(first, self._planned), budget)

    def _cost(self, first: int, stop: int) -> int:
        return math.ceil(self._costs[stop] - self._costs[first] - 1e-6)

    def forget(self) -> list[Encode]:
        """Return what makes the device forget what was encoded of it; none where nothing was."""
        return [Encode(self._image, self.stored, EncodePart(0, 0, self._last))] if self._done else []

    def take(self) -> list[Encode]:
        """Return the part that was planned for the step; none where it had no tokens for one."""
        first, self._done = self._done, self._planned
        part = EncodePart(first, self._planned, self._last)
        return [Encode(self._image, self.stored, part)] if part.first < part.stop else []
