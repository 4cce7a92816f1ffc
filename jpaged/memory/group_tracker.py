"""Knows the records of one layer group's blocks as of the last map, and whose each block is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jpaged.memory.block_records import ROW, BlockState, Indices, Rows, zero_rows
from jpaged.memory.block_tables import NO_BLOCK
from jpaged.memory.group_blocks import GroupBlocks
from jpaged.memory.group_map import GroupMap
from jpaged.memory.layout import GroupLayout
from jpaged.memory.live_records import LiveRecords, Version
from jpaged.memory.pages import PROTECTED

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
        self._live = LiveRecords(zero_rows(plan.num_blocks))
        self._map = self._new_map()
        blocks.changed = self.changed

    def _new_map(self) -> GroupMap:
        spec = self._plan.spec
        plan = self._plan
        return GroupMap(spec.name, spec.block_size, plan.block_bytes, plan.blocks_per_page, Version(self._live))

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
                filled = size if owner == NOBODY else self._tokens[block]  # what no sequence has counts as full
            elif (time := self._blocks.evictable.get(block) or self._blocks.protected.get(block)) is not None:
                state, filled, prefix = _CACHED, size, self._cached_prefix(block)
                need = time.tick - PROTECTED if time.tick >= PROTECTED else time.tick
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
