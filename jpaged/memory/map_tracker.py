"""Takes maps of the memory again and again at the price of what changed in between.

The allocator notes the blocks and pages it changes once somebody asks for a map (`GroupBlocks.changed`). Who owns a
block is read from the tables that changed, entry by entry.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_records import ROW, BlockState, GroupMap, frozen, zero_rows
from jpaged.memory.block_tables import NO_BLOCK, BlockTables, Sequences
from jpaged.memory.layout import PoolLayout
from jpaged.memory.memory_map import MemoryMap
from jpaged.memory.pages import NO_GROUP, PROTECTED
from jpaged.memory.prefix_cache import PrefixCache

CHUNK = 64
"""Table entries that are compared at once."""

Row = tuple[int, int, int, int, int, int, int]
"""The fields of `ROW`."""

NO_ROW: Row = (BlockState.NONE, 0, 0, 0, -1, -1, 0)
EMPTY_ROW: Row = (BlockState.EMPTY, 0, 0, 0, -1, -1, 0)


class Seen:
    """What the last map knew of a sequence: tables, their version, tokens with KV and the prefix it begins with."""

    __slots__ = ("length", "prefixes", "tables", "version")

    def __init__(self, num_groups: int) -> None:
        self.version = -1
        self.length = 0
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.prefixes = [0] * num_groups


class MapTracker:
    """Knows the records of all blocks as of the last map.

    Args:
        allocator: notes its changes from now on; no other tracker may have it.
        sequences: all with blocks in the pool.
    """

    def __init__(
        self, layout: PoolLayout, allocator: BlockAllocator, cache: PrefixCache, sequences: Sequences
    ) -> None:
        self.allocator = allocator
        self._layout = layout
        self._cache = cache
        self._sequences = sequences
        self._page_groups = np.full(layout.num_pages, NO_GROUP, np.int32)
        self._rows = [zero_rows(group.num_blocks) for group in layout.groups]
        self._frozen = [frozen(rows) for rows in self._rows]
        self._seen: dict[int, Seen] = {}
        # Of each group: block -> (sequence -> entry of its table).
        self._holders: list[dict[int, dict[int, int]]] = [{} for _ in layout.groups]
        self._changed: list[set[int]] = []
        for group in allocator.groups:
            group.changed = set()
            self._changed.append(group.changed)
        allocator.pages.changed = self._changed_pages = set(range(layout.num_pages))

    def take(self, clock: int) -> MemoryMap:
        """Return the map of this moment, `clock` on the memory's clock. O(what changed) beside copying the records."""
        self._read_pages()
        self._read_tables()
        for g, changed in enumerate(self._changed):
            if changed:
                blocks = np.fromiter(changed, np.int64, len(changed))
                self._rows[g][blocks] = np.array([self._row(g, block) for block in changed], ROW)
                self._frozen[g] = frozen(self._rows[g])
                changed.clear()
        groups = tuple(
            GroupMap(plan.spec.name, plan.spec.block_size, plan.block_bytes, plan.blocks_per_page, rows)
            for plan, rows in zip(self._layout.groups, self._frozen, strict=True)
        )
        return MemoryMap(self._layout.page_bytes, frozen(self._page_groups), groups, clock)

    # What changed since the last map.

    def _read_pages(self) -> None:
        """Mark the blocks of pages that changed hands, in the old group and the new one."""
        for page in self._changed_pages:
            for g in {int(self._page_groups[page]), self.allocator.pages.group[page]} - {NO_GROUP}:
                size = self._layout.groups[g].blocks_per_page
                self._changed[g].update(range(page * size, (page + 1) * size))
            self._page_groups[page] = self.allocator.pages.group[page]
        self._changed_pages.clear()

    def _read_tables(self) -> None:
        """Mark the blocks that have other owners or hold other tokens than before."""
        gone = self._seen.keys() - self._sequences.keys()
        for seq_id in gone:
            for g, table in enumerate(self._seen.pop(seq_id).tables):
                for block in table:
                    self._let_go(g, block, seq_id)
        for seq_id, sequence in self._sequences.items():
            seen = self._seen.get(seq_id)
            if seen is None:
                seen = self._seen[seq_id] = Seen(len(self._rows))
            if seen.version != sequence.version:
                for g, table in enumerate(sequence.tables):
                    self._read_table(g, seq_id, seen.tables[g], table)
                seen.version = sequence.version
            if seen.length != sequence.num_computed:
                self._mark_written(sequence, *sorted((seen.length, sequence.num_computed)))
                seen.length = sequence.num_computed
            for g, prefix in enumerate(seen.prefixes):
                if prefix != (now := self._prefix_of(sequence, g)):
                    self._changed[g].update(block for block in sequence.tables[g] if block != NO_BLOCK)
                    seen.prefixes[g] = now

    def _read_table(self, g: int, seq_id: int, old: list[int], new: list[int]) -> None:
        """Take in how a table changed; `old` equals it afterwards."""
        entries = list(_differences(old, new))
        for i in entries:
            if i < len(old):
                self._let_go(g, old[i], seq_id)
        for i in entries:
            if i < len(new) and (block := new[i]) != NO_BLOCK:
                self._holders[g].setdefault(block, {})[seq_id] = i
                self._changed[g].add(block)
        old[:] = new

    def _let_go(self, g: int, block: int, seq_id: int) -> None:
        """Forget that a sequence had a block."""
        if block == NO_BLOCK:
            return
        holders = self._holders[g][block]
        del holders[seq_id]
        if not holders:
            del self._holders[g][block]
        self._changed[g].add(block)

    def _mark_written(self, sequence: BlockTables, start: int, stop: int) -> None:
        """Mark the blocks whose number of tokens changes when tokens [`start`, `stop`) come or go."""
        for g, (policy, size) in enumerate(sequence.request.groups):
            written = policy.written_blocks(start, stop, size)
            blocks = sequence.tables[g][written.start : written.stop]
            self._changed[g].update(block for block in blocks if block != NO_BLOCK)

    # One block.

    def _row(self, g: int, block: int) -> Row:
        """Return the record of a block as it is now."""
        group = self.allocator.groups[g]
        if self.allocator.pages.group[block // group.blocks_per_page] != g:
            return NO_ROW
        if count := group.ref_count[block]:
            return self._used_row(g, block, count)
        time = group.evictable.get(block) or group.protected.get(block)
        if time is None:
            return EMPTY_ROW
        tick = time.tick - PROTECTED if time.tick >= PROTECTED else time.tick
        link = self._cache.link(g, block)
        tokens = self._layout.groups[g].spec.block_size
        return BlockState.CACHED, 0, tokens, 0 if link is None else _number(link.root), -1, -1, tick

    def _used_row(self, g: int, block: int, count: int) -> Row:
        state = BlockState.SHARED if count > 1 else BlockState.USED
        holders, tokens = self._holders[g][block], 0
        for seq_id, entry in holders.items():
            sequence = self._sequences[seq_id]
            policy, size = sequence.request.groups[g]
            tokens = max(tokens, policy.filled_tokens(entry, sequence.num_computed, size))
        first = next(iter(holders))
        sequence = self._sequences[first]
        return state, count, tokens, self._prefix_of(sequence, g), sequence.request.request_id, first, 0

    def _prefix_of(self, sequence: BlockTables, g: int) -> int:
        links = self._cache.chain(sequence, g).links
        return _number(links[0].root) if links else 0


def _differences(old: list[int], new: list[int]) -> Iterator[int]:
    """Yield the entries in which two tables differ; those that only one of them has, too."""
    both = min(len(old), len(new))
    if old[:both] != new[:both]:
        for start in range(0, both, CHUNK):
            stop = min(start + CHUNK, both)
            if old[start:stop] != new[start:stop]:
                yield from (i for i in range(start, stop) if old[i] != new[i])
    yield from range(both, max(len(old), len(new)))


def _number(root: bytes) -> int:
    """Return a prefix's number, above 0; 0 for one that is not known."""
    return (int.from_bytes(root[:4], "little") or 1) if root else 0
