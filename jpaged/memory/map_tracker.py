"""Takes maps of the memory, each at the cost of the changes since the last one.

From the first map on, the allocator notes the blocks and pages that it changes (`GroupBlocks.changed`). The owners of
blocks are read from the tables that changed, entry by entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_records import ROW, BlockState, GroupMap, frozen, zero_rows
from jpaged.memory.block_tables import NO_BLOCK, BlockTables, Sequences
from jpaged.memory.layout import GroupLayout, PoolLayout
from jpaged.memory.memory_map import MapChanges, MemoryMap
from jpaged.memory.pages import NO_GROUP, GroupBlocks
from jpaged.memory.prefix_cache import PrefixCache
from jpaged.memory.versioned_array import Indices, Rows, Snapshot, VersionedArray

NOBODY = -1

_NONE, _EMPTY, _CACHED, _USED, _SHARED = map(int, BlockState)  # numbers, which are stored faster


class GroupTracker:
    """Follows one group's blocks. The owner of record of a block is the one among its owners that was seen first.

    Args:
        blocks: the allocator's state of the group, which notes its changes from now on.
        cached_prefix: returns the prefix number of a cached block.
        fill: returns how many tokens a sequence holds in the block at an entry of its table.
        entry: returns the entry at which a sequence's table has a block, given a likely one.

    Attributes:
        changed: blocks whose records have to be written anew; the allocator adds to it.
        request_of: the request of each sequence that owns blocks.
        prefix_of: the prefix number of each sequence that owns blocks.
    """

    def __init__(
        self,
        plan: GroupLayout,
        blocks: GroupBlocks,
        cached_prefix: Callable[[int], int],
        fill: Callable[[int, int], int],
        entry: Callable[[int, int, int], int],
    ) -> None:
        self.changed: set[int] = set()
        self.request_of = {NOBODY: -1}
        self.prefix_of = {NOBODY: 0}
        self._plan = plan
        self._blocks = blocks
        self._cached_prefix = cached_prefix
        self._fill = fill
        self._entry = entry
        self._owner = [NOBODY] * plan.num_blocks
        self._tokens = [0] * plan.num_blocks
        self._shared: dict[int, dict[int, int]] = {}  # of blocks with several owners: sequence -> entry of its table
        self._live = VersionedArray(zero_rows(plan.num_blocks))
        self._map = self._new_map()
        blocks.changed = self.changed

    def _new_map(self) -> GroupMap:
        spec = self._plan.spec
        plan = self._plan
        return GroupMap(spec.name, spec.block_size, plan.block_bytes, plan.blocks_per_page, Snapshot(self._live))

    # Owners.

    def join(self, seq_id: int, table: Sequence[int], entries: Iterable[int]) -> None:
        """Note that a sequence owns the blocks at these entries of its table."""
        owner, tokens, shared, fill = self._owner, self._tokens, self._shared, self._fill
        for i in entries:
            block = table[i]
            if block == NO_BLOCK:
                continue
            filled, first = fill(seq_id, i), owner[block]
            if first == NOBODY:
                owner[block], tokens[block] = seq_id, filled
            else:
                if (holders := shared.get(block)) is None:
                    holders = shared[block] = {first: self._entry(first, block, i)}
                holders[seq_id] = i
                tokens[block] = max(tokens[block], filled)
            self.changed.add(block)

    def leave(self, seq_id: int, blocks: Iterable[int]) -> None:
        """Note that a sequence owns these blocks no longer."""
        owner, shared = self._owner, self._shared
        for block in blocks:
            if block == NO_BLOCK:
                continue
            self.changed.add(block)
            holders = shared.get(block)
            if holders is None:
                owner[block] = NOBODY
                continue
            del holders[seq_id]
            if owner[block] == seq_id:
                owner[block] = next(iter(holders))
            self._count_tokens(block)
            if len(holders) == 1:
                del shared[block]

    def refill(self, seq_id: int, table: Sequence[int], entries: range, *, less: bool) -> None:
        """Count the tokens at these entries of a sequence's table again.

        Args:
            less: whether there may be fewer than before.
        """
        for i in entries[: max(0, len(table) - entries.start)]:
            block = table[i]
            if block == NO_BLOCK:
                continue
            if block not in self._shared:
                self._tokens[block] = self._fill(seq_id, i)
            elif less:
                self._count_tokens(block)
            else:
                self._tokens[block] = max(self._tokens[block], self._fill(seq_id, i))
            self.changed.add(block)

    def rename(self, seq_id: int, table: Iterable[int]) -> None:
        """Write the records of those blocks in the table anew of which the sequence is the owner of record."""
        self.changed.update(block for block in table if block != NO_BLOCK and self._owner[block] == seq_id)

    def _count_tokens(self, block: int) -> None:
        """Count a shared block's tokens: most of those that its owners hold in it."""
        most, known = 0, self._tokens[block]
        for seq_id, entry in self._shared[block].items():
            most = max(most, self._fill(seq_id, entry))
            if most >= known:
                break
        self._tokens[block] = most

    # Records.

    def take(self, page_groups: Sequence[int], number: int) -> tuple[GroupMap, Indices, Rows]:
        """Return the group's map and, ascending, the blocks whose records differ from those of the last one, with them.

        Args:
            page_groups: the group of each large page.
            number: this group's.
        """
        blocks = sorted(self.changed)
        self.changed.clear()
        at = self._live.write(np.array(blocks, np.int64), self._records(blocks, page_groups, number))
        if len(at):
            self._map = self._new_map()
        return self._map, at, self._live.rows[at]

    def _records(self, blocks: list[int], page_groups: Sequence[int], number: int) -> Rows:
        """Return the records of blocks as they are now."""
        ref_count, per_page, size = self._blocks.ref_count, self._plan.blocks_per_page, self._plan.spec.block_size
        counts = [ref_count[block] for block in blocks]
        owners = [self._owner[block] if count else NOBODY for block, count in zip(blocks, counts, strict=True)]
        states, tokens, prefixes, needs = [], [], [], []
        for block, count, owner in zip(blocks, counts, owners, strict=True):
            need = filled = prefix = 0
            if count:
                state, prefix = _SHARED if count > 1 else _USED, self.prefix_of[owner]
                # Blocks of images and adapters belong to no sequence, and count as full.
                filled = size if owner == NOBODY else self._tokens[block]
            elif (time := self._blocks.evictable.get(block) or self._blocks.protected.get(block)) is not None:
                state, filled, prefix = _CACHED, size, self._cached_prefix(block)
                need = time.time
            else:
                state = _EMPTY if page_groups[block // per_page] == number else _NONE
            states.append(state)
            tokens.append(filled)
            prefixes.append(prefix)
            needs.append(need)
        rows = np.empty(len(blocks), ROW)
        rows["state"] = states
        rows["owners"] = counts
        rows["tokens"] = tokens
        rows["prefix"] = prefixes
        rows["request"] = [self.request_of[owner] for owner in owners]
        rows["sequence"] = owners
        rows["last_need"] = needs
        return rows


CHUNK = 64
"""Table entries that are compared at once."""


class Seen:
    """A sequence as of the last map; `tables` are copies."""

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
        """Return the map of this moment, `clock` on the memory's clock. O(changes since the last map).

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

    # Changes since the last map.

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
        """Read which sequences own other blocks or hold other tokens than before; those that were freed come first."""
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
        """Read how many tokens of a sequence have KV, and the prefix they begin with."""
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

    # Facts of a block or a sequence.

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
