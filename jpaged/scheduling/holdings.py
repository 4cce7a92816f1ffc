"""What running sequences hold: blocks of the pool and a row of the batch."""

from __future__ import annotations

from jpaged.memory import BlockCopy, MemoryManager, SwapCopy
from jpaged.scheduling.forks import plan_forks, tokens_to_fork
from jpaged.scheduling.prompt_end import tokens_before_end
from jpaged.scheduling.request import Request, Sequence
from jpaged.scheduling.step import Chunk


class Holdings:
    """Gives sequences blocks and slots and takes them back.

    Args:
        memory: owns the blocks; every allocation goes through it.
        max_num_seqs: slots.
        prompt_tail: see `tokens_before_end`.
    """

    def __init__(self, memory: MemoryManager, max_num_seqs: int, prompt_tail: int = 0) -> None:
        self.memory = memory
        self._prompt_tail = prompt_tail
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))

    def place(
        self, request: Request, live: list[Sequence], budget: int, max_chunk: int, *, use_cache: bool
    ) -> tuple[list[Chunk], list[BlockCopy]] | None:
        """First chunks of a request's sequences, after what the prefix cache holds; None (and nothing held) when
        memory is short. They take `budget` tokens at most, each of them `max_chunk`. A sequence that begins like
        another is left to be forked from it, unless the cache holds what they share."""
        chunks: list[Chunk] = []
        copies: list[BlockCopy] = []
        plan_forks(live)
        for number, seq in enumerate(live):
            if seq.parent is not None and seq.parent.num_computed < seq.fork_at:
                continue
            seq.parent = None
            self.memory.add(
                seq.seq_id,
                request.request_id,
                encoder_tokens=request.encoder_tokens,
                prompt_tokens=len(request.prompt_token_ids),
            )
            most = None if use_cache and request.params.prompt_logprobs is None else 0
            seq.num_computed = self.memory.match_prefix(
                seq.seq_id, seq.token_ids, salt=request.cache_salt, max_tokens=most
            )
            length = min(seq.num_tokens - seq.num_computed, budget, max_chunk, tokens_to_fork(live, seq))
            length = tokens_before_end(seq, length, self._prompt_tail)
            made = self.allocate(seq, seq.num_computed + length) if length > 0 else []
            if made is None:
                for placed in live[: number + 1]:
                    if placed.parent is None:
                        self.drop(placed)
                    placed.num_computed = placed.capacity = 0
                return None
            if length > 0:
                copies += made
                chunks.append(Chunk(seq, seq.num_computed, length, -1, self.tables(seq)))
                budget -= length
        return chunks, copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares every block of its parent; the next append of either looks whether it has to copy."""
        self.memory.fork(parent.seq_id, child.seq_id)
        child.parent = None
        child.num_computed = parent.num_computed
        child.capacity = parent.capacity = 0

    def allocate(self, seq: Sequence, end: int) -> list[BlockCopy] | None:
        """Slots for the sequence's tokens up to `end`; None when the pool cannot give them."""
        self.memory.commit(seq.seq_id, seq.token_ids, seq.num_computed)
        copies = self.memory.allocate(seq.seq_id, end, first_write=seq.num_computed)
        if copies is not None:
            seq.capacity = self.memory.capacity(seq.seq_id)
        return copies

    def tables(self, seq: Sequence) -> list[list[int]]:
        """Its block tables, one a group."""
        memory = self.memory
        return [memory.block_table(seq.seq_id, group) for group in range(len(memory.layout.groups))]

    def release(self, seq: Sequence) -> None:
        """Take back what the sequence holds, if anything, in the pool or in host memory."""
        if seq.slot >= 0:
            if seq.parent is None:
                self.drop(seq)
            self._give_up_slot(seq)
        elif self.memory.swap_space.holds(seq.seq_id):
            self.drop(seq)
        seq.parent = None

    def swap_out(self, live: list[Sequence], unmade: list[BlockCopy]) -> list[SwapCopy] | None:
        """Move all blocks of a request's sequences to the host; None (and nothing moved) when that is full.

        Sequences that are still to be forked have none; they wait with their parents.

        Args:
            unmade: copies that will not be made: what their destinations should hold is in their sources.
        """
        owners = [seq for seq in live if seq.parent is None]
        for seq in owners:
            self.memory.commit(seq.seq_id, seq.token_ids, seq.num_computed)
        moved = self.memory.swap_space.move_out([seq.seq_id for seq in owners])
        if moved is None:
            return None
        for seq in live:
            self._give_up_slot(seq)
        source = {(copy.group, copy.dst): copy.src for copy in unmade}
        return [move._replace(device_block=source.get(move[:2], move.device_block)) for move in moved]

    def swap_in(self, live: list[Sequence], *, keep_room: bool) -> list[SwapCopy] | None:
        """Move them back; None (and nothing moved) when slots or blocks are short."""
        if len(live) > len(self.free_slots):
            return None
        owners = [seq.seq_id for seq in live if seq.parent is None]
        moved = self.memory.swap_space.move_in(owners, keep_room=keep_room)
        if moved is not None:
            for seq in live:
                seq.slot = self.free_slots.pop()
        return moved

    def _give_up_slot(self, seq: Sequence) -> None:
        self.free_slots.append(seq.slot)
        seq.slot = -1
        seq.capacity = 0

    def drop(self, seq: Sequence) -> None:
        """Give up the sequence's blocks, in the pool or in host memory, but not its place in the batch."""
        if not self.memory.swap_space.holds(seq.seq_id):
            known = min(seq.num_computed, len(seq.token_ids))
            self.memory.commit(seq.seq_id, seq.token_ids, known)
        self.memory.free(seq.seq_id)
