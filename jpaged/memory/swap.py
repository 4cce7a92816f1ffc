"""Host blocks for sequences that were swapped out, and the way there and back (PagedAttention, section 4.5).

A swapped sequence keeps its block tables, but their entries are host blocks. A block that several sequences share
is moved once and stays shared, also by sequences that are forked or freed in the meantime.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import NO_BLOCK, BlockTables
from jpaged.memory.capacity import CapacityCheck, ReclaimEstimate
from jpaged.memory.copies import HostBlock, SwapCopy
from jpaged.memory.layout import PoolLayout
from jpaged.memory.step_blocks import StepBlocks
from jpaged.memory.table_updater import TableUpdater
from jpaged.memory.tiers import Tiers


class HostBlocks:
    """Free lists and owner counts of the host blocks of every group, within one bound in bytes.

    Args:
        block_bytes: size of a block, for each group.
        limit_bytes: most bytes that all blocks with an owner take together.
        tiers: share host memory with these blocks, and count their bytes; None = there are none.
    """

    def __init__(self, block_bytes: Sequence[int], limit_bytes: int, tiers: Tiers | None = None) -> None:
        self._tiers = tiers
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.ref_count: list[list[int]] = [[] for _ in block_bytes]
        self.block_bytes = block_bytes
        self._free: list[list[int]] = [[] for _ in block_bytes]

    def num_used(self, g: int) -> int:
        """Return how many blocks of a group have an owner."""
        return len(self.ref_count[g]) - len(self._free[g])

    def capacity(self, g: int) -> int:
        """Return how many blocks of a group there would be if no other group had any."""
        return self.limit_bytes // self.block_bytes[g]

    def take(self, needs: Sequence[int]) -> list[list[int]] | None:
        """Return blocks of each group, for owners that `share` will count; None, with nothing changed, above the
        bound."""
        size = sum(need * size for need, size in zip(needs, self.block_bytes, strict=True))
        most = self.limit_bytes if self._tiers is None else min(self.limit_bytes, self._tiers.most_swapped)
        if self.used_bytes + size > most:
            return None
        self._use(size)
        taken = []
        for need, free, ref_count in zip(needs, self._free, self.ref_count, strict=True):
            first = len(ref_count)
            ref_count += [0] * (need - len(free))
            free += reversed(range(first, len(ref_count)))
            taken.append([free.pop() for _ in range(need)])
        return taken

    def free_blocks(self) -> list[list[int]]:
        """Return the blocks of each group that have no owner; the next ones to take are last."""
        return [list(free) for free in self._free]

    def load(self, ref_count: Sequence[Sequence[int]], free: Sequence[Sequence[int]]) -> None:
        """Restore saved owner counts and free lists, which the caller has compared with `limit_bytes`.

        What adapters have of host memory is not asked: an engine with adapters restores no blocks.
        """
        self.ref_count = [list(counts) for counts in ref_count]
        self._free = [list(blocks) for blocks in free]
        self._use(sum(self.num_used(g) * size for g, size in enumerate(self.block_bytes)) - self.used_bytes)

    def share(self, g: int, block: int) -> None:
        """Count one more owner of a block."""
        self.ref_count[g][block] += 1

    def release(self, g: int, block: int) -> bool:
        """Count one owner less; return True when it was the last and the block is free again."""
        if self.ref_count[g][block] < 1:
            raise RuntimeError(f"host block {block} of group {g} is released but has no owner")
        self.ref_count[g][block] -= 1
        if self.ref_count[g][block]:
            return False
        self._free[g].append(block)
        self._use(-self.block_bytes[g])
        return True

    def _use(self, num_bytes: int) -> None:
        self.used_bytes += num_bytes
        if self._tiers is not None and num_bytes:
            self._tiers.leave_swapped(self.used_bytes)


class SwapSpace:
    """The swapped sequences and their host blocks.

    Args:
        resident: the sequences with blocks in the pool; they move between it and `sequences`.
        limit_bytes: most host memory that swapped blocks take, in the layout's terms (bytes of one device).
        step: the blocks that the step in planning fills or reads.
        capacity: says whether sequences that come back have room.
        tiers: see `HostBlocks`.

    Attributes:
        sequences: the swapped ones, by sequence id.
    """

    def __init__(
        self,
        layout: PoolLayout,
        allocator: BlockAllocator,
        updater: TableUpdater,
        step: StepBlocks,
        resident: dict[int, BlockTables],
        *,
        limit_bytes: int,
        capacity: CapacityCheck,
        tiers: Tiers | None = None,
    ) -> None:
        self.host = HostBlocks([group.block_bytes for group in layout.groups], limit_bytes, tiers)
        self.sequences: dict[int, BlockTables] = {}
        self._resident = resident
        self._capacity = capacity
        self._allocator = allocator
        self._updater = updater
        self._step = step
        self._dropped: list[HostBlock] = []

    def move_out(self, seq_ids: Sequence[int]) -> list[SwapCopy] | None:
        """Exchange the device blocks of a request's sequences for host blocks; each shared block is moved once.

        Commit before: blocks that left every window are not moved. Until it is swapped in again, such a sequence can
        only be forked and freed. Cached blocks stay on the device, evictable.

        Returns:
            The copies to make before anything else of the step, or None when host memory is short, or the step fills
            one of the blocks itself: then nothing has changed.

        Raises:
            ValueError: when these are not all sequences of one request.
        """
        sequences = _whole_request(self._resident, seq_ids)
        blocks = _distinct(sequences)
        filled = self._step.filled
        if filled and any((g, block) in filled for g, mine in enumerate(blocks) for block in mine):
            return None
        taken = self.host.take([len(mine) for mine in blocks])
        if taken is None:
            return None
        there = [dict(zip(mine, theirs, strict=True)) for mine, theirs in zip(blocks, taken, strict=True)]
        for seq_id, sequence in sequences.items():
            tables = _translate(sequence.tables, there)
            self._updater.release_all(sequence)
            sequence.tables = tables
            self._share(sequence)
            self.sequences[seq_id] = self._resident.pop(seq_id)
        return [SwapCopy(g, device, host) for g, pairs in enumerate(there) for device, host in pairs.items()]

    def has_room(
        self,
        seq_ids: Sequence[int],
        *,
        keep_room: bool = True,
        reserved: Sequence[int] | None = None,
        reclaimed: ReclaimEstimate | None = None,
    ) -> bool:
        """Tell whether `move_in` would find blocks for the sequences of a swapped request.

        Args:
            keep_room, reserved: see `move_in`.
            reclaimed: blocks that would be freed first; None = none.
        """
        needs = [len(mine) for mine in _distinct(_whole_request(self.sequences, seq_ids))]
        if keep_room:
            others = reserved or [0] * len(needs)
            needs = [need + len(seq_ids) + more for need, more in zip(needs, others, strict=True)]
        return self._capacity.has_room(needs, may_wait=False, keep_room=keep_room, reclaimed=reclaimed)

    def move_in(
        self, seq_ids: Sequence[int], *, keep_room: bool = True, reserved: Sequence[int] | None = None
    ) -> list[SwapCopy] | None:
        """Give the sequences of a swapped request blocks of the pool again, shared as they were.

        Args:
            keep_room: whether every sequence must be able to append a block, with the watermark still free.
            reserved: blocks of each group that others have yet to take; they count where `keep_room` is set.

        Returns:
            The copies to make, after those of `move_out` and before all block copies, or None when the pool is
            short: then nothing has changed.

        Raises:
            ValueError: when these are not all sequences of one request.
        """
        if not self.has_room(seq_ids, keep_room=keep_room, reserved=reserved):
            return None
        sequences = _whole_request(self.sequences, seq_ids)
        blocks = _distinct(sequences)
        taken = self._allocator.take([len(mine) for mine in blocks], next(iter(sequences.values())).request.open_pages)
        assert taken is not None, "an allocation that has room never fails"
        here = [dict(zip(mine, theirs, strict=True)) for mine, theirs in zip(blocks, taken, strict=True)]
        for g, pairs in enumerate(here):
            for host, device in pairs.items():
                self._step.filled.add((g, device))
                self.host.share(g, host)  # it is read after all that the step swaps out
                self._step.host.append(HostBlock(g, host))
        unowned = [set(mine) for mine in taken]  # taken with a count of 1, which stands for the first owner
        for seq_id, sequence in sequences.items():
            self._release(sequence)
            sequence.tables = _translate(sequence.tables, here)
            for g, table in enumerate(sequence.tables):
                for block in table:
                    if block in unowned[g]:
                        unowned[g].remove(block)
                    elif block != NO_BLOCK:
                        self._allocator.share(g, block)
            sequence.num_hashed = [0] * len(blocks)  # other blocks, which are not in the prefix cache
            sequence.version = self._updater.next_version()
            self._resident[seq_id] = self.sequences.pop(seq_id)
        return [SwapCopy(g, device, host) for g, pairs in enumerate(here) for host, device in pairs.items()]

    def dispatched(self, read: Sequence[HostBlock]) -> None:
        """Release host blocks that a dispatched step has read."""
        for block in read:
            self.host.release(*block)

    def holds(self, seq_id: int) -> bool:
        """Tell whether the sequence's blocks are in host memory."""
        return seq_id in self.sequences

    def fork(self, child_id: int, child: BlockTables) -> None:
        """Count the references of a new sequence whose tables equal a swapped one's."""
        self._share(child)
        self.sequences[child_id] = child

    def free(self, seq_id: int) -> BlockTables:
        """Free the host blocks of a swapped sequence, and return its tables."""
        sequence = self.sequences.pop(seq_id)
        self._dropped += self._release(sequence)
        return sequence

    def take_dropped(self) -> list[HostBlock]:
        """Return the host blocks that were freed, not swapped in, since the last call: the host store may drop them."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def check(self) -> None:
        """Recompute every host count from the tables; for tests.

        Raises:
            AssertionError: a count is wrong; the message names the group.
        """
        used_bytes = 0
        for g, ref_count in enumerate(self.host.ref_count):
            owners = Counter(b for s in self.sequences.values() for b in s.tables[g] if b != NO_BLOCK)
            owners.update(read.block for read in self._step.host if read.group == g)
            assert Counter(dict(enumerate(ref_count))) == owners, f"group {g}: host counts"
            assert self.host.num_used(g) == len(owners), f"group {g}: free host blocks"
            used_bytes += len(owners) * self.host.block_bytes[g]
        assert used_bytes == self.host.used_bytes <= self.host.limit_bytes, "bytes of host blocks"

    def _share(self, sequence: BlockTables) -> None:
        for g, table in enumerate(sequence.tables):
            for block in table:
                if block != NO_BLOCK:
                    self.host.share(g, block)

    def _release(self, sequence: BlockTables) -> list[HostBlock]:
        """Take `sequence` off the owners of its host blocks; return the blocks without an owner now."""
        owned = (HostBlock(g, b) for g, table in enumerate(sequence.tables) for b in table if b != NO_BLOCK)
        return [block for block in owned if self.host.release(*block)]


def _whole_request(known: dict[int, BlockTables], seq_ids: Sequence[int]) -> dict[int, BlockTables]:
    sequences = {seq_id: known[seq_id] for seq_id in seq_ids}
    requests = {sequence.request for sequence in sequences.values()}
    if len(requests) != 1 or len(sequences) != requests.pop().num_seqs:
        raise ValueError(f"sequences {list(seq_ids)} are not all of one request: they are swapped together")
    return sequences


def _distinct(sequences: dict[int, BlockTables]) -> list[list[int]]:
    """Return the blocks of each group that the tables of `sequences` hold, once each."""
    several = list(sequences.values())
    return [
        list(dict.fromkeys(block for sequence in several for block in sequence.tables[g] if block != NO_BLOCK))
        for g in range(len(several[0].tables))
    ]


def _translate(tables: list[list[int]], names: list[dict[int, int]]) -> list[list[int]]:
    return [[mine.get(block, NO_BLOCK) for block in table] for table, mine in zip(tables, names, strict=True)]
