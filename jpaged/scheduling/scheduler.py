"""Iteration-level, first-come-first-served scheduling over paged memory (PagedAttention paper, section 4.5)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq

from jpaged.memory import BlockCopy, Fit, MemoryManager
from jpaged.outputs import FinishReason
from jpaged.scheduling.request import Request, Sequence, Status
from jpaged.scheduling.step import Chunk, Sample, ScheduledStep
from jpaged.scheduling.stops import token_stop


class Scheduler:
    """Decides, step by step, which tokens of which sequences run, and owns the order of requests.

    The engine runs ahead by one step: `schedule` may be called once more before `update` brings the tokens of
    the step before. A sequence found to have ended meanwhile has run one token too many, which is dropped.

    Args:
        memory: owns the blocks; every allocation goes through it.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: most tokens of a step; at least max_num_seqs, so that no decode ever waits.
    """

    def __init__(self, memory: MemoryManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"max_num_batched_tokens={max_num_batched_tokens} is below max_num_seqs={max_num_seqs}")
        self.memory = memory
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.num_preemptions = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it needs more sequences than may run at once, or could not fit an empty pool.
        """
        width = len(request.sequences)
        if width > self.max_num_seqs:
            raise ValueError(f"a request of {width} sequences is above max_num_seqs={self.max_num_seqs}")
        if self.memory.can_admit(request.max_total_tokens, width) is Fit.NEVER:
            layout = self.memory.layout
            raise ValueError(
                f"a request of {len(request.prompt_token_ids)} prompt tokens that may grow to "
                f"{request.max_total_tokens} tokens can never fit the pool of {layout.num_pages} large pages of "
                f"{layout.page_bytes:,} bytes"
            )
        self.waiting.append(request)

    # ------------------------------------------------------------------ a step

    def schedule(self) -> ScheduledStep:
        """The next step; empty when nothing can run before `update` is called, or nothing is left.

        Running requests come first, oldest first. Every decode gets its token before prefills share the rest
        of the budget, so long prompts never hold up running sequences. Waiting requests are admitted in order
        while memory above the watermark lasts, and never in a step that had to preempt.
        """
        plan = _Plan(self.max_num_batched_tokens)
        plan.reserved = sum(missing_tokens(r, s) == 1 for r in self.running for s in r.sequences)
        position = 0
        while position < len(self.running):
            if self._extend(self.running[position], plan):
                position += 1
        if not plan.preempted:
            while self.waiting and self._admit(self.waiting[0], plan):
                pass
        return plan.step()

    def _extend(self, request: Request, plan: _Plan) -> bool:
        """Plan the request's next tokens, preempting newer requests for room.

        Returns False when the request itself had to go; then nothing of it is in the plan.
        """
        chunks: list[Chunk] = []
        copies: list[BlockCopy] = []
        for seq in request.sequences:
            missing = missing_tokens(request, seq)
            length = missing if missing <= 1 else min(missing, plan.left - plan.reserved)
            if length <= 0:
                continue
            tables = None
            end = seq.num_computed + length
            if end > seq.capacity:
                while (made := self._allocate(seq, end)) is None:
                    victim = self.running.pop()
                    self._preempt(victim, plan)
                    if victim is request:
                        return False
                copies += made
                tables = self._tables(seq)
            chunks.append(Chunk(seq, seq.num_computed, length, _source_row(seq, end), tables))
            plan.left -= length
            plan.reserved -= missing == 1
        plan.add(request, chunks, copies)
        return True

    def _admit(self, request: Request, plan: _Plan) -> bool:
        """Move the oldest waiting request into the batch if slots, budget and memory allow."""
        live = request.live
        num_tokens = max(seq.num_tokens for seq in live)
        if (
            plan.left <= 0
            or len(live) > len(self._free_slots)
            or any(seq.num_pending for seq in live)
            or self.memory.can_admit(num_tokens, len(live)) is not Fit.OK
        ):
            return False
        planned = self._place(request, live, plan.left, use_cache=True)
        if planned is None and not self.running:
            # Scattered hits can pin more pages than the sequence needs: an empty batch must not wait for itself.
            planned = self._place(request, live, plan.left, use_cache=False)
        if planned is None:
            return False
        chunks, copies = planned
        plan.left -= sum(chunk.length for chunk in chunks)
        for seq in live:
            seq.slot = self._free_slots.pop()
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
            request.num_cached_tokens = live[0].num_computed
        request.status = Status.RUNNING
        self.waiting.popleft()
        self.running.append(request)
        plan.add(request, chunks, copies)
        return True

    def _place(
        self, request: Request, live: list[Sequence], budget: int, *, use_cache: bool
    ) -> tuple[list[Chunk], list[BlockCopy]] | None:
        """First chunks of a request's sequences, after what the prefix cache holds; None (and nothing held) when
        memory is short."""
        chunks: list[Chunk] = []
        copies: list[BlockCopy] = []
        for number, seq in enumerate(live):
            self.memory.add(seq.seq_id, request.request_id)
            most = None if use_cache else 0
            seq.num_computed = self.memory.match_prefix(seq.seq_id, seq.token_ids, max_tokens=most)
            length = min(seq.num_tokens - seq.num_computed, budget)
            made = self._allocate(seq, seq.num_computed + length) if length > 0 else []
            if made is None:
                for placed in live[: number + 1]:
                    self._drop_memory(placed)
                    placed.num_computed = 0
                return None
            if length > 0:
                copies += made
                chunks.append(Chunk(seq, seq.num_computed, length, -1, self._tables(seq)))
                budget -= length
        return chunks, copies

    def _allocate(self, seq: Sequence, end: int) -> list[BlockCopy] | None:
        """Slots for the sequence's tokens up to `end`; None when the pool cannot give them."""
        self.memory.commit(seq.seq_id, seq.token_ids, seq.num_computed)
        copies = self.memory.allocate(seq.seq_id, end, first_write=seq.num_computed)
        if copies is not None:
            seq.capacity = self.memory.capacity(seq.seq_id)
        return copies

    def _tables(self, seq: Sequence) -> list[list[int]]:
        memory = self.memory
        return [memory.block_table(seq.seq_id, group) for group in range(len(memory.layout.groups))]

    # ------------------------------------------------------------------ giving memory back

    def _preempt(self, request: Request, plan: _Plan) -> None:
        """Take all memory of a running request back; it is recomputed as one prefill of prompt + generated."""
        for seq in request.live:
            plan.reserved -= missing_tokens(request, seq) == 1
            self._release(seq)
            seq.num_computed = 0
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)
        plan.preempted.append(request)

    def _release(self, seq: Sequence) -> None:
        if seq.slot >= 0:
            self._drop_memory(seq)
            self._free_slots.append(seq.slot)
            seq.slot = -1

    def _drop_memory(self, seq: Sequence) -> None:
        known = min(seq.num_computed, len(seq.token_ids))
        self.memory.commit(seq.seq_id, seq.token_ids, known)
        self.memory.free(seq.seq_id)
        seq.capacity = 0

    # ------------------------------------------------------------------ what came back

    def update(self, step: ScheduledStep, tokens: Seq[int], logprobs: Seq[float]) -> list[Request]:
        """Take a step's sampled tokens and their log-probabilities; returns the requests that finished."""
        finished: list[Request] = []
        now = time.monotonic()
        for sample, token, logprob in zip(step.samples, tokens, logprobs, strict=True):
            request, seq, _ = sample
            seq.num_pending -= 1
            if seq.finish_reason is not None:
                continue
            seq.token_ids.append(token)
            seq.cumulative_logprob += logprob
            if request.first_token_time is None:
                request.first_token_time = now
            stop = token_stop(request, seq)
            if stop is not None and self.finish(request, seq, *stop):
                finished.append(request)
        return finished

    def finish(self, request: Request, seq: Sequence, reason: FinishReason, stop_reason: str | int | None) -> bool:
        """End one sequence and free its memory; True when it was the request's last."""
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        self._release(seq)
        if request.live:
            return False
        request.finished_time = time.monotonic()
        self._forget(request)
        return True

    def abort(self, request: Request) -> None:
        """Drop a request that nobody waits for; its memory is free at once. A finished one is left alone."""
        if request.status is Status.FINISHED:
            return
        for seq in request.live:
            seq.finish_reason = "abort"
            self._release(seq)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        queue = self.running if request.status is Status.RUNNING else self.waiting
        queue.remove(request)
        request.status = Status.FINISHED


class _Plan:
    """A step being made."""

    def __init__(self, budget: int) -> None:
        self.left = budget
        self.reserved = 0  # of `left`: tokens that decodes not planned yet will take
        self.decodes: list[Chunk] = []
        self.prefills: list[Chunk] = []
        self.samples: list[Sample] = []
        self.copies: list[BlockCopy] = []
        self.preempted: list[Request] = []

    def add(self, request: Request, chunks: list[Chunk], copies: list[BlockCopy]) -> None:
        for chunk in chunks:
            seq, start, length, _, _ = chunk
            (self.decodes if length == 1 else self.prefills).append(chunk)
            seq.num_computed = end = start + length
            if end == seq.num_tokens:
                seq.num_pending += 1
                seq.pending_row = len(self.samples)
                self.samples.append(Sample(request, seq, chunk))
        self.copies += copies

    def step(self) -> ScheduledStep:
        return ScheduledStep(self.decodes + self.prefills, self.samples, self.copies, self.preempted)


def missing_tokens(request: Request, seq: Sequence) -> int:
    """Tokens of a sequence that wait to be computed; 0 once it ended or its last token is on its way."""
    if seq.finish_reason is not None:
        return 0
    total = len(seq.token_ids) + seq.num_pending
    return 0 if total >= request.max_total_tokens else total - seq.num_computed


def _source_row(seq: Sequence, end: int) -> int:
    """Row of the last step's samples that holds token ``end - 1``, or -1 when the host has it."""
    return seq.pending_row if end > len(seq.token_ids) else -1
