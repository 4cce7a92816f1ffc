"""The cached blocks of a group without an owner, in the order in which they are evicted."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from jpaged.memory.eviction_key import LEVEL_BITS, EvictionKey


class EvictionQueue:
    """Blocks by level of priority and, within a level, in the order in which they were added.

    Keys of one level have to be added in order. Nearly all blocks are of level 0.
    """

    __slots__ = ("_by_level", "_level_of", "_levels", "_plain")

    def __init__(self) -> None:
        self._plain: OrderedDict[int, EvictionKey] = OrderedDict()
        self._by_level = {0: self._plain}
        self._levels = [0]  # in order
        self._level_of: dict[int, int] = {}  # of the blocks of other levels

    def __setitem__(self, block: int, key: EvictionKey) -> None:
        level = key.tick >> LEVEL_BITS  # as none is protected
        if level:
            self._level_of[block] = level
            if level not in self._by_level:
                self._by_level[level] = OrderedDict()
                insort(self._levels, level)
        self._by_level[level][block] = key

    def __getitem__(self, block: int) -> EvictionKey:
        return self._by_level[self._level_of.get(block, 0)][block]

    def pop(self, block: int, default: EvictionKey | None = None) -> EvictionKey | None:
        """Take a block out and return its key; return `default` where it is not there."""
        level = self._level_of.pop(block, 0) if self._level_of else 0
        if not level:
            return self._plain.pop(block, default)
        mine = self._by_level[level]
        key = mine.pop(block)
        if not mine:
            del self._by_level[level]
            self._levels.remove(level)
        return key

    def get(self, block: int) -> EvictionKey | None:
        """Return the key of a block; None where it is not there."""
        if self._level_of and block in self._level_of:
            return self._by_level[self._level_of[block]][block]
        return self._plain.get(block)

    def __contains__(self, block: object) -> bool:
        return block in self._plain or block in self._level_of

    def __len__(self) -> int:
        return len(self._plain) + len(self._level_of)

    def __iter__(self) -> Iterator[int]:
        for level in list(self._levels):
            yield from self._by_level[level]

    def items(self) -> Iterator[tuple[int, EvictionKey]]:
        """Yield blocks and keys, the first to be evicted first."""
        for level in list(self._levels):
            yield from self._by_level[level].items()

    def values(self) -> Iterator[EvictionKey]:
        """Yield the keys in order."""
        return (key for _, key in self.items())

    @property
    def has_high_levels(self) -> bool:
        """Tell whether a block has a level above 0, so that one released later may be evicted before it."""
        return self._levels[-1] > 0
