"""The order in which cached blocks are evicted, as one comparable key."""

from __future__ import annotations

from typing import NamedTuple

LEVEL_BITS = 48
"""Ticks are below 2 to this power; a tick's bits from there on are the level of priority."""

PROTECTED = 1 << 62
"""Added to the tick of a protected block's time: it is evicted after all that are not."""


class EvictionKey(NamedTuple):
    """Order of eviction: the priority and the time of a block's last need on one logical clock for all groups. The
    least goes first.

    Attributes:
        tick: blocks released together share a tick. A level of priority counts more than any time, see `at_level`.
        negative_end: minus the last token position the block's prefix covers, so that among equal ticks the
            longest prefix goes first and all groups lose the same tokens (Jenga's aligned eviction).
    """

    tick: int
    negative_end: int

    def at_level(self, level: int) -> EvictionKey:
        """Return the key of a block of another level of priority that was needed at the same time."""
        return EvictionKey((level << LEVEL_BITS) + self.time, self.negative_end)

    @property
    def level(self) -> int:
        """Return the level of priority: 0 is the default, lower ones are evicted first."""
        return (self.tick - PROTECTED if self.tick >= PROTECTED else self.tick) >> LEVEL_BITS

    @property
    def time(self) -> int:
        """Return the time alone."""
        return self.tick & ((1 << LEVEL_BITS) - 1)
