"""The order in which a tier drops its pages: those of the lowest priority first, then the least recently needed."""

from __future__ import annotations

import math
from collections import OrderedDict
from heapq import heapify, heappop, heappush


class PageOrder:
    """Pages by level of priority and by when they were needed; a level may end.

    A level is a priority less the default, so that it is 0 for pages of which no request said anything.
    """

    def __init__(self) -> None:
        self._order: dict[int, OrderedDict[int, None]] = {}  # by level, the least recently needed first
        self._level: dict[int, int] = {}
        self._until: dict[int, float] = {}  # of pages whose level ends
        self._ends: list[tuple[float, int]] = []  # with stale entries: of pages removed, or kept longer

    def level(self, page: int) -> int:
        """Return the level of a page."""
        return self._level[page]

    def add(self, page: int, level: int) -> None:
        """Add a page, which is needed now; its level does not end before `extend` says when."""
        self._level[page] = level
        self._order.setdefault(level, OrderedDict())[page] = None

    def extend(self, page: int, until: float) -> None:
        """Let the level of a page end no earlier than that."""
        if self._level[page] and until > self._until.get(page, -math.inf):
            self._until[page] = until
            if until < math.inf:
                heappush(self._ends, (until, page))
            if len(self._ends) > 2 * len(self._until) + 64:
                self._ends = [(end, each) for each, end in self._until.items() if end < math.inf]
                heapify(self._ends)

    def touch(self, page: int) -> None:
        """Note that a page is needed now."""
        self._order[self._level[page]].move_to_end(page)

    def remove(self, page: int) -> None:
        """Forget a page."""
        level = self._level.pop(page)
        del self._order[level][page]
        if not self._order[level]:
            del self._order[level]
        self._until.pop(page, None)

    def end_levels(self, now: float) -> None:
        """Give pages whose level has ended the default one, among which they were needed first."""
        while self._ends and self._ends[0][0] <= now:
            until, page = heappop(self._ends)
            if self._until.get(page) == until:
                self.remove(page)
                self.add(page, 0)
                self._order[0].move_to_end(page, last=False)

    def first(self) -> int:
        """Return the page that is dropped first."""
        return next(iter(self._order[min(self._order)]))

    def first_above(self, level: int) -> int | None:
        """Return the page that is dropped first of those of a higher level; None = there is none."""
        above = [mine for mine in self._order if mine > level]
        return next(iter(self._order[min(above)])) if above else None

    def num_up_to(self, level: int) -> int:
        """Return how many pages have this level or a lower one."""
        return sum(len(pages) for mine, pages in self._order.items() if mine <= level)
