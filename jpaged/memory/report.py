"""Reports the state of the pool: blocks by state, bytes reserved and used, waste, and the blocks that sharing saves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import NO_BLOCK, BlockTables
from jpaged.memory.checkpoint_share import CheckpointShare
from jpaged.memory.layout import PoolLayout
from jpaged.memory.shared_blocks import SharedBlocks
from jpaged.memory.swap import HostBlocks


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


@dataclass(frozen=True)
class GroupReport:
    """State of one layer group; bytes are those of one device.

    Attributes:
        name: the group's name.
        block_bytes: size of a block, padding included.
        used: blocks with an owner.
        evictable: cached blocks without an owner.
        empty: blocks without content in large pages of this group.
        reserved_bytes: bytes of used and empty blocks, which no other group can have; cached ones count as free.
        token_bytes: bytes of real layers' KV for tokens that exist, each shared token once; of states that exist.
        padding_bytes: bytes of phantom layers and rows in the used blocks.
        padding: share of every block that these waste, see `PoolLayout.plan`.
        table_entries: blocks that the sequences would own if nothing were shared.
        pinned: used blocks that are held for good.
        unproven: evictable blocks of states that no request has begun with, see `CheckpointShare`.
        most_unproven: most of these that may stay.
        host_used: blocks of swapped sequences in host memory.
        host_blocks: most blocks of this group that host memory could hold.
    """

    name: str
    block_bytes: int
    used: int
    evictable: int
    empty: int
    reserved_bytes: int
    token_bytes: int
    padding_bytes: int
    table_entries: int
    padding: float = 0.0
    pinned: int = 0
    unproven: int = 0
    most_unproven: int = 0
    host_used: int = 0
    host_blocks: int = 0

    @property
    def waste(self) -> float:
        """Return the share of the reserved bytes that holds no token."""
        return 1 - self.token_bytes / self.reserved_bytes if self.reserved_bytes else 0.0

    @property
    def blocks_saved(self) -> int:
        """Return how many blocks sharing saves."""
        return self.table_entries - self.used

    @property
    def saving(self) -> float:
        """Return (blocks without sharing - blocks) / blocks without sharing (PagedAttention, section 6.3)."""
        return self.blocks_saved / self.table_entries if self.table_entries else 0.0


@dataclass(frozen=True)
class MemoryReport:
    """State of the pool; ``str()`` is a table.

    Attributes:
        groups: one report a layer group.
        page_bytes: bytes of a large page.
        num_pages: large pages in the pool.
        free_pages: large pages that belong to no group.
        idle_pages: large pages that hold only cached and empty blocks.
        host_bytes: host memory that swapped blocks may take.
        host_used_bytes: host memory that swapped blocks take now.
    """

    groups: tuple[GroupReport, ...]
    page_bytes: int
    num_pages: int
    free_pages: int
    idle_pages: int
    host_bytes: int = 0
    host_used_bytes: int = 0

    @property
    def used(self) -> int:
        """Return how many blocks have an owner, over all groups."""
        return sum(group.used for group in self.groups)

    @property
    def blocks_saved(self) -> int:
        """Return how many blocks sharing saves, over all groups."""
        return sum(group.blocks_saved for group in self.groups)

    @property
    def stranded_bytes(self) -> int:
        """Return the bytes of empty blocks that no other group can have before their page is free."""
        return sum(group.empty * group.block_bytes for group in self.groups)

    @property
    def saving(self) -> float:
        """Return (blocks without sharing - blocks) / blocks without sharing, over all groups."""
        return self.blocks_saved / (self.used + self.blocks_saved) if self.used else 0.0

    def __str__(self) -> str:
        head = ("group", "used", "evictable", "empty", "reserved", "tokens", "waste", "padding", "saved")
        rows = [head]
        for g in self.groups:
            rows.append(
                (
                    g.name,
                    str(g.used),
                    str(g.evictable),
                    str(g.empty),
                    _size(g.reserved_bytes),
                    _size(g.token_bytes),
                    f"{g.waste:.1%}" if g.used else "-",  # an idle engine wastes nothing, it keeps a cache
                    _size(g.padding_bytes),
                    f"{g.blocks_saved} ({g.saving:.1%})",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        lines.append(
            f"pool of {_size(self.num_pages * self.page_bytes)}, {self.num_pages} large pages of "
            f"{_size(self.page_bytes)}: "
            f"{self.free_pages} free, {self.idle_pages} only cached; sharing saves {self.saving:.1%} of the blocks"
        )
        if self.stranded_bytes and len(self.groups) > 1:
            share = self.stranded_bytes / (self.num_pages * self.page_bytes)
            lines.append(
                f"stranded in empty blocks, which only their group can take: {_size(self.stranded_bytes)}, {share:.1%}"
            )
        if padded := ", ".join(f"{g.name} {g.padding:.1%}" for g in self.groups if g.padding):
            lines.append(f"blocks are padded, to keep large pages small: {padded}")
        if any(g.pinned for g in self.groups):
            lines.append("pinned blocks: " + ", ".join(f"{g.name} {g.pinned}" for g in self.groups))
        if states := ", ".join(f"{g.name} {g.unproven}/{g.most_unproven}" for g in self.groups if g.most_unproven):
            lines.append(f"cached states that no request has begun with: {states}")
        if self.host_bytes:
            swapped = ", ".join(f"{g.name} {g.host_used}/{g.host_blocks}" for g in self.groups)
            used = f"{_size(self.host_used_bytes)} used"
            lines.append(f"swap space of {_size(self.host_bytes)}: {used}; blocks used/most: {swapped}")
        return "\n".join(lines)


def build_report(
    layout: PoolLayout,
    allocator: BlockAllocator,
    tables: Mapping[int, BlockTables],
    lengths: Mapping[int, int],
    host: HostBlocks,
    pinned: Iterable[int],
    shared: Iterable[SharedBlocks],
    checkpoints: CheckpointShare | None = None,
) -> MemoryReport:
    """Collect the report; `lengths` overrides the committed length of a sequence, `shared` are images
    and adapters. O(blocks in use)."""
    groups, filled_of = [], {whole.group: whole.filled for whole in shared}
    for g, group in enumerate(layout.groups):
        state = allocator.groups[g]
        filled, entries = filled_of[g]() if g in filled_of else _filled_tokens(g, tables, lengths)
        real_bytes = group.spec.real_bytes
        groups.append(
            GroupReport(
                name=group.spec.name,
                block_bytes=group.block_bytes,
                used=state.num_used,
                evictable=len(state.evictable) + len(state.protected),
                empty=state.num_empty,
                reserved_bytes=(state.num_used + state.num_empty) * group.block_bytes,
                token_bytes=filled * real_bytes // group.spec.block_size,
                padding_bytes=state.num_used * (group.block_bytes - real_bytes),
                table_entries=entries,
                padding=group.padding,
                pinned=len({block for s in pinned for block in tables[s].tables[g]} - {NO_BLOCK}),
                unproven=0 if checkpoints is None else checkpoints.count(g),
                most_unproven=0 if checkpoints is None else checkpoints.most(g),
                host_used=host.num_used(g),
                host_blocks=host.capacity(g),
            )
        )
    pages = allocator.pages
    return MemoryReport(
        groups=tuple(groups),
        page_bytes=layout.page_bytes,
        num_pages=layout.num_pages,
        free_pages=len(pages.free),
        idle_pages=pages.num_idle,
        host_bytes=host.limit_bytes,
        host_used_bytes=host.used_bytes,
    )


def _filled_tokens(g: int, tables: Mapping[int, BlockTables], lengths: Mapping[int, int]) -> tuple[int, int]:
    """Return (tokens held by the used blocks of a group, each shared one once; table entries)."""
    filled: dict[int, int] = {}
    entries = 0
    for seq_id, sequence in tables.items():
        length = lengths.get(seq_id, sequence.num_computed)
        policy, size = sequence.request.groups[g]
        for i, block in enumerate(sequence.tables[g]):
            if block != NO_BLOCK:
                entries += 1
                tokens = policy.filled_tokens(i, length, size)
                filled[block] = max(tokens, filled.get(block, 0))
    return sum(filled.values()), entries


def _size(num_bytes: int) -> str:
    """Write a number of bytes for people: ``3.5 MiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
