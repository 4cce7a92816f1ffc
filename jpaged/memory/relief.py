"""What the pool would have to spare if some sequences gave their blocks up, found without freeing them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import NO_BLOCK, BlockTables


class Relief:
    """Counts what more and more sequences would free together.

    A block counts once all its owners are among them, a large page once all its used blocks are.

    Attributes:
        pages: large pages that would become available.
        spare: blocks of each group to be had from pages that stay mixed; less than 0 where pages leave.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self.pages = 0
        self.spare = [0] * len(allocator.groups)
        self._allocator = allocator
        self._owners: list[Counter[int]] = [Counter() for _ in allocator.groups]
        self._freed: Counter[int] = Counter()

    def add(self, sequence: BlockTables) -> None:
        """Count one more sequence, which was not counted before. O(its blocks)."""
        for g, table in enumerate(sequence.tables):
            self.add_blocks(g, [block for block in table if block != NO_BLOCK])

    def add_blocks(self, g: int, blocks: Iterable[int]) -> None:
        """Count one more owner of some blocks of a group."""
        pages, group, owners = self._allocator.pages, self._allocator.groups[g], self._owners[g]
        for block in blocks:
            owners[block] += 1
            if owners[block] < group.ref_count[block]:
                continue
            page = block // group.blocks_per_page
            self._freed[page] += 1
            if self._freed[page] < pages.num_used[page]:
                self.spare[g] += 1
            else:
                self.pages += 1
                self.spare[g] -= group.blocks_per_page - 1
