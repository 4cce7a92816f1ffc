"""The priorities that requests gave to cached tokens, by the names of blocks, and when they end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Any

from jpaged.cache_retention import DEFAULT_PRIORITY, CacheRetention


class Retention:
    """Levels of priority (priority less the default) of blocks whose content is cached.

    Where several requests gave one content a priority, the highest counts.

    Args:
        num_groups: number of layer groups.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, num_groups: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: list[dict[bytes, tuple[int, float]]] = [{} for _ in range(num_groups)]  # level and end
        self._ends: list[tuple[float, int, bytes]] = []  # with stale entries: of contents forgotten, or kept longer

    def __bool__(self) -> bool:
        return any(self._kept)

    def now(self) -> float:
        """Return the time on the clock on which levels end."""
        return self._clock()

    def note(self, g: int, name: bytes, level: int, seconds: float | None) -> None:
        """Give a content a level for so many seconds; a higher one that it has stays, and so does one that ends later
        on the same level."""
        end = math.inf if seconds is None else self._clock() + seconds
        if (level, end) > self._kept[g].get(name, (-math.inf, 0.0)):
            self.put(g, name, (level, end))

    def level(self, g: int, name: bytes) -> int:
        """Return the level of a content; 0 = it has the default priority."""
        level, end = self._kept[g].get(name, (0, math.inf))
        return level if end > self._clock() else 0

    def get(self, g: int, name: bytes) -> tuple[int, float] | None:
        """Return the level of a content and when it ends, for `put`."""
        return self._kept[g].get(name)

    def put(self, g: int, name: bytes, kept: tuple[int, float]) -> None:
        """Give a content a level and when it ends, as `get` returns them."""
        self._kept[g][name] = kept
        if kept[1] == math.inf:
            return
        heappush(self._ends, (kept[1], g, name))
        if len(self._ends) > 2 * sum(map(len, self._kept)) + 64:
            self._ends = [
                (end, g, name) for g, each in enumerate(self._kept) for name, (_, end) in each.items() if end < math.inf
            ]
            heapify(self._ends)

    def forget(self, g: int, name: bytes) -> None:
        """Forget a content that was evicted."""
        self._kept[g].pop(name, None)

    def take_ended(self) -> list[tuple[int, bytes]]:
        """Return the contents whose priority has ended since the last call, and forget these."""
        ended = []
        if self._ends and self._ends[0][0] <= (now := self._clock()):
            while self._ends and self._ends[0][0] <= now:
                end, g, name = heappop(self._ends)
                if self._kept[g].get(name, (0, math.nan))[1] == end:  # else it was forgotten, or given another end
                    del self._kept[g][name]
                    ended.append((g, name))
        return ended

    def data(self) -> list[Any]:
        """Return the levels as plain data, with the seconds that are left of each."""
        now = self._clock()
        return [
            [g, name, level, None if end == math.inf else end - now]
            for g, kept in enumerate(self._kept)
            for name, (level, end) in kept.items()
        ]

    def load(self, data: Iterable[Any]) -> None:
        """Restore what `data` returned."""
        for g, name, level, seconds in data:
            self.note(g, name, level, seconds)


def level_at(retention: CacheRetention, position: int) -> tuple[int, float | None] | None:
    """Return the level of a token of a request and for how many seconds; None = the request asks for none."""
    for start, end, priority, seconds in retention.directives:
        if start <= position and (end is None or position < end):
            return priority - DEFAULT_PRIORITY, seconds
    return None
