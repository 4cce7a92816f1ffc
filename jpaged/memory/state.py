"""What can be asked of the memory of all sequences without changing it."""

from __future__ import annotations

from collections.abc import Mapping

from jpaged.memory import invariants
from jpaged.memory.adapters import AdapterBlocks
from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_counts import BlockCounts
from jpaged.memory.block_tables import Sequences
from jpaged.memory.disk import DiskTier
from jpaged.memory.images import ImageBlocks
from jpaged.memory.layout import PoolLayout
from jpaged.memory.map_tracker import MapTracker
from jpaged.memory.memory_map import MemoryMap
from jpaged.memory.ownership import Ownership
from jpaged.memory.pinned_blocks import PinnedBlocks
from jpaged.memory.policies import UNBOUNDED
from jpaged.memory.prefix_cache import PrefixCache
from jpaged.memory.report import MemoryReport, build_report
from jpaged.memory.swap import SwapSpace


class MemoryState:
    """Counts, tables and reports; `MemoryManager` makes the parts and changes them.

    Attributes:
        layout: how the pool is cut.
        swap_space: where sequences are swapped out to, and how they come back.
        images: the features of images, which belong to no sequence.
        adapters: low-rank adapters, which belong to no sequence either.
        disk: where cached blocks go that the pool loses; None = they are lost.
    """

    layout: PoolLayout
    swap_space: SwapSpace
    images: ImageBlocks
    adapters: AdapterBlocks
    disk: DiskTier | None
    _allocator: BlockAllocator
    _cache: PrefixCache
    _sequences: Sequences
    _pinned: PinnedBlocks
    _ownership: Ownership
    _tracker: MapTracker | None = None

    def free_blocks(self, group: int) -> int:
        """Return how many blocks `group` could get if no other group took any."""
        blocks = self._allocator.groups[group]
        return blocks.spare + self._allocator.pages.num_available * blocks.blocks_per_page

    @property
    def num_used_blocks(self) -> int:
        """Return how many blocks sequences and images in use hold, over all groups."""
        return sum(group.num_used for group in self._allocator.groups)

    @property
    def block_counts(self) -> tuple[BlockCounts, ...]:
        """Return the blocks of each group by state. O(groups)."""
        return tuple(
            BlockCounts(plan.spec.name, state.num_used, len(state.evictable) + len(state.protected), state.num_empty)
            for plan, state in zip(self.layout.groups, self._allocator.groups, strict=True)
        )

    @property
    def num_available_pages(self) -> int:
        """Return how many large pages hold nothing in use: free ones, and those with cached blocks only."""
        return self._allocator.pages.num_available

    @property
    def reserved_blocks(self) -> list[int]:
        """Return, for each group, the number of blocks that sequences hold and of empty ones that no other group can
        have."""
        return [group.num_used + group.num_empty for group in self._allocator.groups]

    def capacity(self, seq_id: int) -> int:
        """Return how many tokens the sequence's tables can hold without a new block, the least over groups."""
        sequence = self._sequences[seq_id]
        slots, least = sequence.num_slots, UNBOUNDED
        for (policy, size), table in zip(sequence.request.groups, sequence.tables, strict=True):
            capacity = len(table) * size if policy.appends else policy.capacity(len(table), size, slots)
            if capacity < least:
                least = capacity
        return least

    def block_table(self, seq_id: int, group: int) -> list[int]:
        """Return logical to physical block, `NO_BLOCK` where released. It is the manager's own list: do not write to
        it."""
        return self._sequences[seq_id].tables[group]

    def report(self, lengths: Mapping[int, int] | None = None) -> MemoryReport:
        """Return the state of the pool. O(blocks in use).

        Args:
            lengths: tokens with KV by sequence id, where the caller knows better than the last `commit`.
        """
        return build_report(
            self.layout,
            self._allocator,
            self._sequences,
            lengths or {},
            self.swap_space.host,
            self._pinned.seq_ids,
            (self.images, self.adapters),
        )

    def map(self, lengths: Mapping[int, int] | None = None) -> MemoryMap:
        """Return every large page and block. O(pool) the first time, and O(what changed since) from then on.

        Args:
            lengths: as for `report`.
        """
        if self._tracker is None or self._tracker.allocator is not self._allocator:
            self._tracker = MapTracker(self.layout, self._allocator, self._cache, self._sequences)
        tracker, self._tracker = self._tracker, None  # an exception in between, as Ctrl-C, leaves none half changed
        found = tracker.take(self._ownership.clock, lengths or {})
        self._tracker = tracker
        return found

    def check_invariants(self) -> None:
        """Recompute every count from the tables. O(pool); for tests.

        Raises:
            AssertionError: a count is wrong; the message names the group, page or block.
        """
        invariants.check(self._allocator, self._cache, self._sequences.values(), (self.images, self.adapters))
        self.swap_space.check()
        if self.disk is not None:
            self.disk.check()
