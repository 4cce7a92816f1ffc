"""Where the tokens of a prompt lie on several axes of positions, as rotary embedding turns by them (M-RoPE).

A token of text lies at the same place on all axes (Qwen2-VL, Wang et al., 2024, section 2.1). Those of an item lie
where its `PromptItem.offsets` say, from where the item begins, and the token after it `PromptItem.advance` after that.
So a token's places may be before or after its position in the cache, which counts tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jpaged.scheduling.inputs import PromptItem


class AxisPositions:
    """Places of all tokens of a sequence with items, those that it will generate included.

    Args:
        items: those of the prompt, in order; at least one has offsets.

    Raises:
        ValueError: their offsets are of different numbers of axes.
    """

    def __init__(self, items: Sequence[PromptItem]) -> None:
        axes = {item.offsets.shape[1] for item in items if item.offsets is not None}
        if len(axes) != 1:
            raise ValueError(f"items have offsets on {sorted(axes)} axes; all need the same number, and one needs some")
        (self.axes,) = axes
        self._items = [item for item in items if item.length]
        moves = (0 if item.advance is None else item.advance - item.length for item in self._items)
        self._moved = np.concatenate([np.zeros(1, np.int32), np.cumsum(np.fromiter(moves, np.int32))])
        self._stops = [item.stop for item in self._items]

    @property
    def moved(self) -> int:
        """Return how far a token after all items lies from its position in the cache."""
        return int(self._moved[-1])

    def of(self, start: int, stop: int) -> Int[np.ndarray, "tokens axes"]:
        """Return the places of tokens [`start`, `stop`), by their positions in the cache."""
        first = bisect_right(self._stops, start)
        plain = np.arange(start, stop, dtype=np.int32)
        if first == len(self._items):
            return np.repeat(plain[:, None] + self.moved, self.axes, axis=1)
        places = np.repeat(
            (plain + self._moved[np.searchsorted(self._stops, plain, "right")])[:, None], self.axes, axis=1
        )
        for number in range(first, len(self._items)):
            item = self._items[number]
            low, high = max(start, item.start), min(stop, item.stop)
            if low >= stop:
                break
            if item.offsets is not None and low < high:
                base = item.start + self._moved[number]
                places[low - start : high - start] = base + item.offsets[low - item.start : high - item.start]
        return places


def places_of(asks: Mapping[str, Any]) -> AxisPositions | None:
    """Return the places of the sequences of a request that asks for these contents; None where they are of text."""
    items = [one for asked in asks.values() if isinstance(asked, tuple) for one in asked if isinstance(one, PromptItem)]
    return axis_positions(items)


def axis_positions(items: Sequence[PromptItem]) -> AxisPositions | None:
    """Return the places of a sequence with these items; None where it has those of text."""
    return AxisPositions(items) if any(item.offsets is not None for item in items) else None
