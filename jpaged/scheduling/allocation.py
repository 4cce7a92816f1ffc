"""The allocation of running sequences: blocks of the pool, a row of the batch, and forks.

Sequences of one request that begin alike compute what they share once (PagedAttention, section 4.4). The first
computes it; every other is forked from the one it shares most with, as soon as that has computed what they share. A new
request of n outputs forks n - 1 of them at the end of its prompt and draws all n from one row. A preempted request is
rebuilt in the same way from prompt and generated tokens, as the tree that its sequences form."""

from __future__ import annotations

from itertools import takewhile

from jpaged.memory import BlockCopy, MemoryManager, SwapCopy
from jpaged.scheduling.held import Holds, Reach
from jpaged.scheduling.request import Request, Sequence
from jpaged.scheduling.step import Chunk


class Allocation:
    """Gives sequences blocks and rows and takes them back.

    Args:
        memory: owns the blocks; every allocation goes through it.
        max_num_seqs: number of rows.
        holds: what requests hold in addition to the KV of their sequences.

    Attributes:
        free_rows: rows that no sequence has.
    """

    def __init__(self, memory: MemoryManager, max_num_seqs: int, holds: Holds) -> None:
        self.memory = memory
        self.holds = holds
        self._max_num_seqs = max_num_seqs
        self._prompt_tail = memory.layout.prompt_tail
        self.free_rows = self._all_rows

    @property
    def _all_rows(self) -> list[int]:
        return list(range(self._max_num_seqs - 1, -1, -1))

    def clear(self) -> None:
        """Take back everything that sequences have, and clear the memory."""
        self.memory.clear()
        self.holds.clear()
        self.free_rows = self._all_rows

    def attach(self, request: Request, seq: Sequence, most_cached: int | None, *, from_tiers: bool = False) -> None:
        """Give a sequence block tables that begin with the cached blocks of its tokens.

        Args:
            most_cached: upper bound on these tokens, None = as many as there are.
            from_tiers: whether it also gets the blocks that were read from tiers for the request.
        """
        self.memory.add(
            seq.seq_id,
            request.request_id,
            encoder_tokens=request.encoder_tokens,
            prompt_tokens=len(request.prompt_token_ids),
            kept_tokens=request.kept_tokens,
            retention=request.retention,
            marks=request.prefix_ends,
        )
        if request.compact_placement:
            self.memory.pack(seq.seq_id)
        most = 0 if request.computes_whole_prompt else most_cached
        name = self.holds.prefix(request)
        seq.num_computed = self.memory.match_prefix(
            seq.seq_id,
            seq.token_ids,
            salt=name.salt,
            spans=name.spans,
            max_tokens=most,
            from_tiers=from_tiers,
        )

    def detach(self, seq: Sequence) -> None:
        """Undo `attach`, for a sequence to which nothing else was given."""
        self.drop(seq)
        seq.num_computed = seq.capacity = 0

    def place(
        self, request: Request, live: list[Sequence], budget: int, max_chunk: int, most_cached: int | None
    ) -> tuple[list[Chunk], list[BlockCopy], int] | None:
        """Allocate the first chunks of a request's sequences, of which the first is attached already.

        The order matters: what is held as a whole comes first, then for each sequence what it reads and its blocks.
        Where one of them is not to be had, everything taken before is released. A sequence that begins like another
        waits to be forked from it, unless the cache holds the tokens that they share.

        Returns:
            The chunks, the copies to make before them, and the rest of the budget; None, with nothing held, when memory
            is short.

        Args:
            budget: most tokens that all chunks and what is held take together.
            max_chunk: most tokens of one chunk.
            most_cached: see `attach`.
        """
        chunks: list[Chunk] = []
        copies: list[BlockCopy] = []
        if not self.holds.hold(request):
            self.detach(live[0])
            return None
        plan_forks(live)
        for number, seq in enumerate(live):
            if seq.parent is not None and seq.parent.num_computed < seq.fork_at:
                continue
            seq.parent = None
            if number:
                self.attach(request, seq, most_cached)
            length = min(seq.num_tokens - seq.num_computed, budget, max_chunk, tokens_to_fork(live, seq))
            length = tokens_before_end(seq, length, self._prompt_tail)
            reach: Reach | None = Reach(length, 0)
            if request.asks:
                reach = self.holds.reach(request, seq, length, budget)
            made: list[BlockCopy] | None = None
            if reach is not None:
                length, budget = reach.length, budget - reach.cost
                made = self.allocate(seq, seq.num_computed + length) if length > 0 else []
                shorter = None if made is not None else self.holds.shorten(request, seq.num_computed, length, chunks)
                if shorter is not None:
                    length = shorter
                    made = self.allocate(seq, seq.num_computed + length)
            if made is None:
                self.memory.cancel(copies)
                self.holds.release(request)
                for placed in live[: number + 1]:
                    if placed.parent is None:
                        self.drop(placed)
                    placed.num_computed = placed.capacity = 0
                return None
            if length > 0:
                copies += made
                chunks.append(Chunk(seq, seq.num_computed, length, -1, self.tables(seq)))
                budget -= length
        return chunks, copies, budget

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share every block of the parent with the child. The next append of either copies the block that both would
        write."""
        self.memory.fork(parent.seq_id, child.seq_id)
        child.parent = None
        child.num_computed = parent.num_computed
        child.capacity = parent.capacity = 0

    def commit(self, seq: Sequence) -> None:
        """Add the blocks that the sequence filled to the prefix cache, and release those that it reads no more. Its
        tokens up to `num_computed` were dispatched."""
        if self.memory.commit(seq.seq_id, seq.token_ids, seq.num_computed):
            seq.capacity = 0  # the tables must be sent again

    def allocate(self, seq: Sequence, end: int) -> list[BlockCopy] | None:
        """Give the sequence blocks for its tokens up to `end`; return the block copies to make before, or None, with
        nothing changed, when the pool is short."""
        self.memory.commit(seq.seq_id, seq.token_ids, seq.num_computed)
        copies = self.memory.allocate(seq.seq_id, end, first_write=seq.num_computed)
        if copies is not None:
            seq.capacity = self.memory.capacity(seq.seq_id)
        return copies

    def tables(self, seq: Sequence) -> list[list[int]]:
        """Return the sequence's block tables, one a group."""
        memory = self.memory
        return [memory.block_table(seq.seq_id, group) for group in range(len(memory.layout.groups))]

    def release(self, seq: Sequence) -> None:
        """Release the blocks and the row of a sequence, if it has any, in the pool or in host memory."""
        if seq.row >= 0:
            if seq.parent is None:
                self.drop(seq)
            self._release_row(seq)
        elif self.memory.swap_space.holds(seq.seq_id):
            self.drop(seq)
        seq.parent = None

    def swap_out(self, live: list[Sequence], unmade: list[BlockCopy]) -> list[SwapCopy] | None:
        """Move all blocks of a request's sequences to the host; None (and nothing moved) when that is full, or the
        step fills some of them.

        Sequences that are still to be forked have none; they wait with their parents.

        Args:
            unmade: planned copies that are cancelled. Their destinations were never written, so their sources are
                swapped out instead.
        """
        owners = [seq for seq in live if seq.parent is None]
        for seq in owners:
            self.memory.commit(seq.seq_id, seq.token_ids, seq.num_computed)
        moved = self.memory.swap_space.move_out([seq.seq_id for seq in owners])
        if moved is None:
            return None
        for seq in live:
            self._release_row(seq)
        source = {(copy.group, copy.dst): copy.src for copy in unmade}
        return [move._replace(device_block=source.get(move[:2], move.device_block)) for move in moved]

    def swap_in(self, live: list[Sequence]) -> list[SwapCopy]:
        """Move the blocks of a request's sequences back to the pool. Admission found enough rows and blocks."""
        owners = [seq.seq_id for seq in live if seq.parent is None]
        moved = self.memory.swap_space.move_in(owners, keep_room=False)
        assert moved is not None, "a request that is swapped in was found to have room"
        for seq in live:
            seq.row = self.free_rows.pop()
        return moved

    def _release_row(self, seq: Sequence) -> None:
        self.free_rows.append(seq.row)
        seq.row = -1
        seq.capacity = 0

    def drop(self, seq: Sequence) -> None:
        """Release the sequence's blocks, in the pool or in host memory, but not its row."""
        self.memory.free(seq.seq_id)

    def drop_any(self, seq: Sequence) -> None:
        """Release the sequence's blocks, if it has any."""
        if self.memory.holds(seq.seq_id):
            self.drop(seq)


def plan_forks(live: list[Sequence]) -> None:
    """Choose for each sequence of a request, none of which has blocks, the earlier sequence to fork it from: the first
    that shares most tokens with it."""
    outputs = [seq.output_token_ids for seq in live]  # they have the prompt in common
    for number, seq in enumerate(live):
        seq.parent, seq.fork_at = None, 0
        for other, output in zip(live[:number], outputs, strict=False):
            shared = seq.num_prompt + num_common(output, outputs[number])
            if shared > seq.fork_at:
                seq.parent, seq.fork_at = other, shared
            if shared == len(seq.token_ids):  # no other shares more
                break


def num_common(a: list[int], b: list[int]) -> int:
    """Return how many tokens two outputs have in common before they differ."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def tokens_to_fork(sequences: list[Sequence], seq: Sequence) -> int:
    """Return the most tokens `seq` may compute in one chunk, which has to end where one of `sequences` is forked from
    it."""
    ends = (child.fork_at for child in sequences if child.parent is seq and child.fork_at > seq.num_computed)
    return min(ends, default=seq.num_tokens) - seq.num_computed


def children_due(sequences: list[Sequence], seq: Sequence) -> list[Sequence]:
    """Return those of `sequences` to be forked from `seq` now that its computation is planned up to `num_computed`."""
    return [child for child in sequences if child.parent is seq and child.fork_at == seq.num_computed]


def tokens_before_end(seq: Sequence, most: int, tail: int) -> int:
    """Return how many of a sequence's next `most` tokens one chunk may take.

    A chunk ends with the prompt, and the last `tail` tokens of a prompt (all of a shorter one) are computed together,
    so that one step has their queries. 0 where `most` are too few for that.

    Args:
        tail: what the layers' policies ask for, see `Policy.prompt_tail`; 0 = chunks end anywhere. It is at most what
            one prompt gets in a step, however many decodes there are.
    """
    rest = seq.num_prompt - seq.num_computed
    if tail == 0 or rest <= 0:
        return most
    return rest if most >= rest else max(0, min(most, rest - tail))
