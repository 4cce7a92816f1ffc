"""Iteration-level scheduling over paged memory (PagedAttention paper, section 4.5)."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Sequence as Seq

from jpaged.memory import BlockCopy, Fit, MemoryManager
from jpaged.outputs import FinishReason
from jpaged.scheduling.beam_sequences import offer
from jpaged.scheduling.forks import children_due, tokens_to_fork
from jpaged.scheduling.holdings import Holdings
from jpaged.scheduling.order import SchedulingPolicy, service_order
from jpaged.scheduling.plan import StepPlan, missing_tokens, source_row
from jpaged.scheduling.preemption import Preemption, PreemptionMode
from jpaged.scheduling.prompt_end import tokens_before_end
from jpaged.scheduling.request import Request, Sequence, Status
from jpaged.scheduling.step import Chunk, ScheduledStep, TopTokens
from jpaged.scheduling.stops import token_stop


class Scheduler:
    """Decides, step by step, which tokens of which sequences run, and owns the order of requests.

    The engine runs ahead by one step: `schedule` may be called once more before `update` brings the tokens of
    the step before. A sequence found to have ended meanwhile has run one token too many, which is dropped.

    Args:
        memory: owns the blocks; every allocation goes through it.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: most tokens of a step; at least max_num_seqs, so that no decode ever waits.
        policy: "fcfs", or "priority" (see `order`).
        long_prefill_token_threshold: most tokens of one prompt in one step; 0 = as many as the budget has.
        preemption_mode: see `Preemption`; swapping needs a memory with swap space.
        prompt_tail: see `tokens_before_end`; at most what one prompt gets in a step, however many decodes there are.
    """

    def __init__(
        self,
        memory: MemoryManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: SchedulingPolicy = "fcfs",
        long_prefill_token_threshold: int = 0,
        preemption_mode: PreemptionMode = "recompute",
        prompt_tail: int = 0,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"max_num_batched_tokens={max_num_batched_tokens} is below max_num_seqs={max_num_seqs}")
        self.memory = memory
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.policy = policy
        self.waiting: list[Request] = []  # all three in service order
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self._num_added = 0
        self._max_chunk = long_prefill_token_threshold or max_num_batched_tokens
        self.holdings = Holdings(memory, max_num_seqs, prompt_tail)
        self._prompt_tail = prompt_tail
        self.preemption = Preemption(self.holdings, preemption_mode)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.swapped)

    @property
    def num_preemptions(self) -> int:
        """How often a request's memory was taken back, by either way."""
        return self.preemption.num_recomputes + self.preemption.num_swaps

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it needs more sequences than may run at once, could not fit an empty pool, or has a
                priority where none counts.
        """
        if request.priority is not None and self.policy != "priority":
            raise ValueError(f"priority={request.priority} needs scheduling_policy='priority', not {self.policy!r}")
        width = len(request.sequences)
        if width > self.max_num_seqs:
            raise ValueError(f"a request of {width} sequences is above max_num_seqs={self.max_num_seqs}")
        num_prompt = len(request.prompt_token_ids)
        if self._can_admit(request, request.max_total_tokens, width) is Fit.NEVER:
            layout, several = self.memory.layout, f" in each of {width} sequences" if width > 1 else ""
            raise ValueError(
                f"a request of {num_prompt} prompt tokens that may grow to {request.max_total_tokens} tokens{several} "
                f"can never fit the pool of {layout.num_pages} large pages of {layout.page_bytes:,} bytes"
            )
        request.arrival_number = self._num_added
        self._num_added += 1
        insort(self.waiting, request, key=service_order)

    # ------------------------------------------------------------------ a step

    def schedule(self) -> ScheduledStep:
        """The next step; empty when nothing can run before `update` is called, or nothing is left.

        Running requests come first, in service order. Every decode gets its token before prefills share the
        rest of the budget, so long prompts never hold up running sequences. Swapped requests come back, then
        waiting requests are admitted, in order, while memory above the watermark lasts; neither in a step that had
        to preempt, and nothing is admitted while a swapped request waits.
        """
        plan = StepPlan(self.max_num_batched_tokens, self.memory.swap_space.take_dropped())
        plan.reserved = sum(missing_tokens(r, s) == 1 for r in self.running for s in r.sequences)
        position = 0
        while position < len(self.running):
            if self._extend(self.running[position], plan):
                position += 1
        if not plan.preempted:
            while self.swapped and self._resume(self.swapped[0], plan):
                pass
            while self.waiting and not self.swapped and self._admit(self.waiting[0], plan):
                pass
        return plan.step()

    def _extend(self, request: Request, plan: StepPlan, *, may_preempt: bool = True) -> bool:
        """Plan the request's next tokens, preempting the last in service order for room.

        Returns False when the request itself had to go, or, where nothing may be preempted, to wait for a step;
        then no token of it is in the plan.
        """
        left, reserved = plan.left, plan.reserved
        chunks: list[Chunk] = []
        copies: list[BlockCopy] = []
        for seq in request.sequences:
            missing = missing_tokens(request, seq)
            length = missing
            if missing > 1:
                most = tokens_to_fork(request.sequences, seq)
                length = min(missing, plan.left - plan.reserved, self._max_chunk, most)
                length = tokens_before_end(seq, length, self._prompt_tail)
            if length <= 0:
                continue
            tables = None
            end = seq.num_computed + length
            if end > seq.capacity:
                while (made := self.holdings.allocate(seq, end)) is None:
                    if not may_preempt:
                        plan.left, plan.reserved = left, reserved
                        plan.add(request, [], copies)
                        for other in request.live:
                            other.capacity = 0  # the tables were not sent
                        return False
                    victim = self.running.pop()
                    self.preemption.take_back(victim, plan, copies if victim is request else [])
                    insort(self._queue(victim), victim, key=service_order)
                    if victim is request:
                        return False
                copies += made
                tables = self.holdings.tables(seq)
            chunks.append(Chunk(seq, seq.num_computed, length, source_row(seq, end), tables))
            plan.left -= length
            plan.reserved -= missing == 1
        self._plan(request, chunks, copies, plan)
        return True

    def _plan(self, request: Request, chunks: list[Chunk], copies: list[BlockCopy], plan: StepPlan) -> None:
        plan.add(request, chunks, copies)
        if len(request.sequences) > 1:
            for chunk in chunks:
                for child in children_due(request.sequences, chunk.seq):
                    self.holdings.fork(chunk.seq, child)
                    if child.num_computed == child.num_tokens:
                        plan.sample(request, child, chunk)

    def _resume(self, request: Request, plan: StepPlan) -> bool:
        """Bring the first swapped request back into the batch."""
        # An empty batch must not wait for room: the request had all its blocks in this pool before.
        if not self.preemption.bring_back(request, plan, keep_room=bool(self.running)):
            return False
        del self.swapped[0]
        insort(self.running, request, key=service_order)
        self._extend(request, plan, may_preempt=False)
        return True

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Move the first waiting request into the batch if slots, budget and memory allow."""
        live = request.live
        num_tokens = max(seq.num_tokens for seq in live)
        if (
            plan.left <= 0
            or not tokens_before_end(live[0], min(plan.left, self._max_chunk), self._prompt_tail)
            or len(live) > len(self.holdings.free_slots)
            or any(seq.num_pending for seq in live)
            or self._can_admit(request, num_tokens, len(live)) is not Fit.OK
        ):
            return False
        planned = self.holdings.place(request, live, plan.left, self._max_chunk, use_cache=True)
        if planned is None and not self.running:
            # Scattered hits can pin more pages than the sequence needs: an empty batch must not wait for itself.
            planned = self.holdings.place(request, live, plan.left, self._max_chunk, use_cache=False)
        if planned is None:
            return False
        chunks, copies = planned
        plan.left -= sum(chunk.length for chunk in chunks)
        for seq in live:
            seq.slot = self.holdings.free_slots.pop()
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
            request.num_cached_tokens = live[0].num_computed
        request.status = Status.RUNNING
        del self.waiting[0]
        insort(self.running, request, key=service_order)
        self._plan(request, chunks, copies, plan)
        return True

    def _can_admit(self, request: Request, num_tokens: int, num_seqs: int) -> Fit:
        """Whether that many sequences of the request, `num_tokens` each, fit."""
        shared = len(request.prompt_token_ids)
        return self.memory.can_admit(
            num_tokens,
            num_seqs,
            shared_tokens=shared,
            encoder_tokens=request.encoder_tokens,
            prompt_tokens=shared,
        )

    # ------------------------------------------------------------------ what came back

    def update(
        self, step: ScheduledStep, tokens: Seq[int], logprobs: Seq[float], top: TopTokens | None = None
    ) -> list[Request]:
        """Take a step's sampled tokens, their log-probabilities and, where a request asked for them, the most
        likely tokens; returns the requests that finished."""
        finished: list[Request] = []
        now = time.monotonic()
        for row, (sample, token, logprob) in enumerate(zip(step.samples, tokens, logprobs, strict=True)):
            request, seq, _ = sample
            seq.num_pending -= 1
            if seq.finish_reason is not None:
                continue
            if request.first_token_time is None:
                request.first_token_time = now
            if request.beam is not None:
                assert top is not None, "the step was asked for a beam's candidates"
                if offer(request, seq, top.row(row, request.num_top), self.holdings):
                    self._end(request)
                    finished.append(request)
                continue
            seq.token_ids.append(token)
            seq.cumulative_logprob += logprob
            if seq.grammar is not None:
                seq.grammar.accept(token)
            if top is not None and request.params.logprobs is not None:
                seq.logprobs.append((logprob, top.row(row, request.params.logprobs)))
            stop = token_stop(request, seq)
            if stop is not None and self.finish(request, seq, *stop):
                finished.append(request)
        return finished

    def finish(self, request: Request, seq: Sequence, reason: FinishReason, stop_reason: str | int | None) -> bool:
        """End one sequence and free its memory; True when it was the request's last."""
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        self.holdings.release(seq)
        if request.live:
            return False
        self._end(request)
        return True

    def _end(self, request: Request) -> None:
        request.finished_time = time.monotonic()
        self._forget(request)

    def abort(self, request: Request) -> None:
        """Drop a request that nobody waits for; its memory is free at once. A finished one is left alone."""
        if request.status is Status.FINISHED:
            return
        for seq in request.live:
            seq.finish_reason = "abort"
            self.holdings.release(seq)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self._queue(request).remove(request)
        request.status = Status.FINISHED

    def _queue(self, request: Request) -> list[Request]:
        queues = {Status.RUNNING: self.running, Status.SWAPPED: self.swapped, Status.WAITING: self.waiting}
        return queues[request.status]
