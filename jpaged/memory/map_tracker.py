"""Takes maps of the memory again and again at the price of what changed in between.

The allocator notes the blocks and pages it changes once somebody asks for a map (`GroupBlocks.changed`). Who owns a
block is read from the tables that changed, entry by entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_records import frozen
from jpaged.memory.block_tables import BlockTables, Sequences
from jpaged.memory.group_tracker import GroupTracker
from jpaged.memory.layout import PoolLayout
from jpaged.memory.memory_map import MapChanges, MemoryMap
from jpaged.memory.pages import NO_GROUP
from jpaged.memory.prefix_cache import PrefixCache

CHUNK = 64
"""Table entries that are compared at once."""


class Seen:
    """What the last map knew of a sequence; `tables` are copies of those it had then."""

    __slots__ = ("length", "sequence", "tables", "version")

    def __init__(self, sequence: BlockTables) -> None:
        self.sequence = sequence
        self.version = -1
        self.length = 0
        self.tables: list[list[int]] = [[] for _ in sequence.tables]


class MapTracker:
    """Knows the pool as of the last map.

    Args:
        allocator: notes its changes from now on; no other tracker may have it.
        sequences: all with blocks in the pool.
    """

    def __init__(self, layout: PoolLayout, allocator: BlockAllocator, cache: PrefixCache, sequences: Sequences) -> None:
        self.allocator = allocator
        self._layout = layout
        self._cache = cache
        self._sequences = sequences
        self._seen: dict[int, Seen] = {}
        self._lengths: Mapping[int, int] = {}
        self._groups = [
            GroupTracker(plan, blocks, partial(self._cached_prefix, g), partial(self._fill, g), partial(self._entry, g))
            for g, (plan, blocks) in enumerate(zip(layout.groups, allocator.groups, strict=True))
        ]
        self._page_groups = np.full(layout.num_pages, NO_GROUP, np.int32)
        self._pages = frozen(self._page_groups)
        allocator.pages.changed = self._changed_pages = set(range(layout.num_pages))
        self._last: object = None

    def take(self, clock: int, lengths: Mapping[int, int]) -> MemoryMap:
        """Return the map of this moment, `clock` on the memory's clock. O(what changed).

        Args:
            lengths: tokens with KV by sequence id, where the caller knows better than the last commit.
        """
        self._lengths = lengths
        pages = self._read_pages()
        self._read_tables()
        now = self.allocator.pages.group
        taken = [group.take(now, g) for g, group in enumerate(self._groups)]
        changes = MapChanges(pages, tuple(blocks for _, blocks, _ in taken), tuple(rows for _, _, rows in taken))
        self._last, before = object(), self._last
        groups = tuple(group for group, _, _ in taken)
        return MemoryMap(
            self._layout.page_bytes, self._pages, groups, clock, identity=self._last, since=before, newest=changes
        )

    # What changed since the last map.

    def _read_pages(self) -> np.ndarray:
        """Mark the blocks of pages that changed hands, in the old group and the new one; return those pages."""
        now, changed = self.allocator.pages.group, sorted(self._changed_pages)
        self._changed_pages.clear()
        for page in changed:
            before = int(self._page_groups[page])
            if before == now[page] and before == NO_GROUP:
                continue
            for g in {before, now[page]} - {NO_GROUP}:
                size = self._layout.groups[g].blocks_per_page
                self._groups[g].changed.update(range(page * size, (page + 1) * size))
        at = np.array(changed, np.int64)
        after = np.array([now[page] for page in changed], np.int32)
        at, after = at[differs := self._page_groups[at] != after], after[differs]
        if len(at):
            self._page_groups[at] = after
            self._pages = frozen(self._page_groups)
        return at

    def _read_tables(self) -> None:
        """Take in which sequences own other blocks or hold other tokens than before; who leaves goes first."""
        sequences, seen = self._sequences, self._seen
        for seq_id in [s for s, mine in seen.items() if sequences.get(s) is not mine.sequence]:
            for group, table in zip(self._groups, seen.pop(seq_id).tables, strict=True):
                group.leave(seq_id, table)
                del group.request_of[seq_id], group.prefix_of[seq_id]
        joining = []
        for seq_id, sequence in sequences.items():
            mine = seen.get(seq_id)
            if mine is None:
                mine = seen[seq_id] = Seen(sequence)
                for g, group in enumerate(self._groups):
                    group.request_of[seq_id] = sequence.request.request_id
                    group.prefix_of[seq_id] = self._prefix_of(sequence, g)
            if mine.version != sequence.version:
                mine.version = sequence.version
                for g, (old, new) in enumerate(zip(mine.tables, sequence.tables, strict=True)):
                    if entries := list(differences(old, new)):
                        self._groups[g].leave(seq_id, [old[i] for i in entries if i < len(old)])
                        old[entries[0] :] = new[entries[0] :]
                        joining.append((g, seq_id, old, [i for i in entries if i < len(new)]))
        for g, seq_id, table, entries in joining:
            self._groups[g].join(seq_id, table, entries)
        for seq_id, mine in seen.items():
            self._read_progress(seq_id, mine)

    def _read_progress(self, seq_id: int, mine: Seen) -> None:
        """Take in how many tokens of a sequence have KV, and what prefix they begin with."""
        sequence, before = mine.sequence, mine.length
        now = mine.length = self._lengths.get(seq_id, sequence.num_computed)
        start, stop = (before, now) if before < now else (now, before)
        for g, group in enumerate(self._groups):
            if start != stop:
                policy, size = sequence.request.groups[g]
                written = policy.written_blocks(start, stop, size)
                group.refill(seq_id, sequence.tables[g], written, less=now < before)
            prefix = self._prefix_of(sequence, g)
            if prefix != group.prefix_of[seq_id]:
                group.prefix_of[seq_id] = prefix
                group.rename(seq_id, sequence.tables[g])

    # What is asked of a block or a sequence.

    def _fill(self, g: int, seq_id: int, entry: int) -> int:
        sequence = self._seen[seq_id].sequence
        policy, size = sequence.request.groups[g]
        return policy.filled_tokens(entry, self._lengths.get(seq_id, sequence.num_computed), size)

    def _entry(self, g: int, seq_id: int, block: int, likely: int) -> int:
        table = self._seen[seq_id].tables[g]
        return likely if likely < len(table) and table[likely] == block else table.index(block)

    def _prefix_of(self, sequence: BlockTables, g: int) -> int:
        links = self._cache.chain(sequence, g).links
        return _number(links[0].first) if links else 0

    def _cached_prefix(self, g: int, block: int) -> int:
        link = self._cache.link(g, block)
        return 0 if link is None else _number(link.first)


def differences(old: list[int], new: list[int]) -> Iterator[int]:
    """Yield the entries in which two tables differ, ascending; those that only one of them has, too."""
    both = min(len(old), len(new))
    if old[:both] != new[:both]:
        for start in range(0, both, CHUNK):
            stop = min(start + CHUNK, both)
            if old[start:stop] != new[start:stop]:
                yield from (i for i in range(start, stop) if old[i] != new[i])
    yield from range(both, max(len(old), len(new)))


def _number(first: bytes) -> int:
    """Return a prefix's number, above 0; 0 for one that is not known."""
    return (int.from_bytes(first[:4], "little") or 1) if first else 0
