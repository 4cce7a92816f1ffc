"""Records the blocks that the step in planning fills from another memory or still reads, until it is dispatched.

A step's work runs in phases (`jpaged.scheduling.work`), after all its blocks were chosen. Two rules follow. A block
that comes from another tier holds nothing yet, so it can go to neither before. And a block that is still read
keeps an owner, so that no other content is put there first: the source of a copy, and a host block that is swapped in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.checkpoint_share import CheckpointShare, Guess
from jpaged.memory.copies import BlockCopy, HostBlock
from jpaged.memory.eviction_key import EvictionKey
from jpaged.memory.prefix_cache import PrefixCache


class StepBlocks:
    """Blocks by what the step in planning does with them before its tokens are computed.

    Args:
        allocator, cache: the pool's blocks and their contents.
        checkpoints: bounds cached states; None = there are none.

    Attributes:
        filled: blocks of the pool, as (group, block), that are filled from another tier.
        sources: blocks of the pool that copies read; each copy is an owner of its source.
        levels: levels of priority of those that stay cached once they were read, where these are not the default.
        host: host blocks that are swapped in, which have an owner more.
    """

    def __init__(
        self, allocator: BlockAllocator, cache: PrefixCache, checkpoints: CheckpointShare | None = None
    ) -> None:
        self._checkpoints = checkpoints
        self._allocator = allocator
        self._cache = cache
        self.filled: set[tuple[int, int]] = set()
        self.sources: Counter[tuple[int, int]] = Counter()
        self.levels: dict[tuple[int, int], int] = {}
        self.host: list[HostBlock] = []

    def owners(self, g: int, block: int) -> int:
        """Return how many owners a block has, copies not counted: they read it before any token is written."""
        return self._allocator.groups[g].ref_count[block] - self.sources.get((g, block), 0)

    def reads(self, g: int, block: int) -> None:
        """Let a copy take over from a block's owner that copies it."""
        self.sources[g, block] += 1

    def cancel(self, copies: Iterable[BlockCopy], time: int) -> None:
        """Give back the sources of copies that are not made.

        Args:
            time: tick of the eviction clock.
        """
        for copy in copies:
            self.sources[copy.group, copy.src] -= 1
            self._release(copy.group, copy.src, time)
            self.levels.pop((copy.group, copy.src), None)

    def dispatched(self, time: int) -> list[HostBlock]:
        """Note that the device has the step: give back what it reads. Return its host blocks.

        Args:
            time: see `cancel`.
        """
        if not (self.filled or self.sources or self.host):
            return []
        for g, block in self.sources.elements():
            self._release(g, block, time)
        host = self.host
        self.filled, self.sources, self.levels, self.host = set(), Counter(), {}, []
        return host

    def _release(self, g: int, block: int, time: int) -> None:
        keep, key = self._cache.holds(g, block), EvictionKey(time, 0)
        self._allocator.release(g, block, key.at_level(self.levels.get((g, block), 0)), keep=keep)
        if keep and self._checkpoints is not None:
            self._checkpoints.left(g, block, Guess.AT_END)
