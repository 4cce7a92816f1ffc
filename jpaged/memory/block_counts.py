"""How many blocks of a layer group are in which state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockCounts:
    """Counts of one layer group's blocks in the large pages that belong to it.

    Attributes:
        name: the group's name.
        used: blocks with an owner.
        evictable: cached blocks without an owner.
        empty: blocks without content that no other group can have before their page is free.
    """

    name: str
    used: int
    evictable: int
    empty: int

    def __add__(self, other: BlockCounts) -> BlockCounts:
        """Add the counts of the same group in another pool."""
        return BlockCounts(
            self.name, self.used + other.used, self.evictable + other.evictable, self.empty + other.empty
        )
