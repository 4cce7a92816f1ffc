"""Iteration-level scheduling over paged memory (PagedAttention paper, section 4.5)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from jpaged.memory import BlockCopy, MemoryManager
from jpaged.outputs import FinishReason
from jpaged.scheduling.admission import Admission, SharedPrefills
from jpaged.scheduling.allocation import Allocation, tokens_before_end
from jpaged.scheduling.beam_sequences import offer
from jpaged.scheduling.constrained import Constrained
from jpaged.scheduling.decode_ends import DecodeEnds
from jpaged.scheduling.held import Holds, PrefixName, StepLimits, sure_tokens
from jpaged.scheduling.hooks import accept
from jpaged.scheduling.planning import NextTokens, plan_decodes
from jpaged.scheduling.preemption import Preemption, PreemptionMode
from jpaged.scheduling.queues import Queues, SchedulingPolicy, urgency
from jpaged.scheduling.request import Request, Sequence, Status, Stop, find_stop, token_stop
from jpaged.scheduling.restart import begin_again
from jpaged.scheduling.speculation import Speculation, StepCosts
from jpaged.scheduling.speculation.drafting import Drafting, drafts_kept
from jpaged.scheduling.step import Chunk, Decodes, ScheduledStep, StepPlan, decodes_due
from jpaged.scheduling.tier_prefetch import TierPrefetch
from jpaged.scheduling.top_tokens import TopTokens
from jpaged.scheduling.work_kinds import make_work

logger = logging.getLogger(__name__)


class Scheduler:
    """Decides, step by step, which tokens of which sequences run, and owns the order of requests.

    It is composed of parts: `Queues` holds the requests, `Admission` answers whether one has room, `Allocation` gives
    blocks and rows, `Preemption` takes them back, `NextTokens` plans the chunks of running requests.

    The engine runs ahead by one step: `schedule` may be called once more before `update` brings the tokens of the step
    before. A sequence that `update` finds to have ended has run one token too many, which is dropped. Between the two,
    `dispatched` says that the device has the step; where that, or anything else, fails, `restart` mends the state.

    Args:
        memory: owns the blocks; every allocation goes through it.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: most tokens of a step; at least max_num_seqs, so that no decode ever waits.
        policy: "fcfs", or "priority" (see `queues`).
        long_prefill_token_threshold: most tokens of one prompt in one step; 0 = as many as the budget has.
        preemption_mode: see `Preemption`; swapping needs a memory with swap space.
        speculation: makes drafts; None = no draft is verified.
        num_rows: rows of the sampler, at least max_num_seqs; drafts take those without a sequence. None: as many.
        costs: see `Constrained`.

    Attributes:
        constrained: follows the sequences' grammars.
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
        speculation: Speculation | None = None,
        num_rows: int | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"max_num_batched_tokens={max_num_batched_tokens} is below max_num_seqs={max_num_seqs}")
        self.memory = memory
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self._rows_for_drafts = (num_rows or max_num_seqs) - max_num_seqs
        self.policy = policy
        self.speculation = speculation
        self.num_added = 0
        self.queues = Queues()
        self._unfinished: dict[int, Request] = {}  # an exception in the middle of a change cannot tear it
        self._max_chunk = max_chunk = long_prefill_token_threshold or max_num_batched_tokens
        self._prompt_tail = memory.layout.prompt_tail
        holds = Holds(memory, StepLimits(sure_tokens(max_num_batched_tokens, max_num_seqs), max_chunk))
        self.allocation = Allocation(memory, max_num_seqs, holds)
        self.constrained = Constrained(costs)
        self._drafting = None if speculation is None else Drafting(speculation, self.allocation, max_num_seqs)
        self._next_tokens = NextTokens(self.allocation, self._drafting, max_chunk=max_chunk)
        self.admission = Admission(self.allocation, self.queues)
        self.preemption = Preemption(self.queues, self.allocation, self.admission, preemption_mode)
        self._ends = DecodeEnds()
        self._shared_prefills = SharedPrefills(memory, holds, max_num_batched_tokens, max_chunk)
        tiers = memory.tiers
        self.tier_prefetch = None if tiers is None else TierPrefetch(memory, tiers, holds, max_num_batched_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self._unfinished)

    @property
    def waiting(self) -> list[Request]:
        return self.queues.waiting

    @property
    def running(self) -> list[Request]:
        return self.queues.running

    @property
    def swapped(self) -> list[Request]:
        return self.queues.swapped

    @property
    def requests(self) -> list[Request]:
        """Return all requests that have not ended."""
        return self.queues.requests

    def prefix_name(self, request: Request) -> PrefixName:
        """Return the name under which the prefix cache has the request's tokens."""
        return self.allocation.holds.prefix(request)

    @property
    def num_preemptions(self) -> int:
        """Return how often a request's memory was taken back, by either way."""
        return self.preemption.num_recomputes + self.preemption.num_swaps

    def add(self, request: Request, *, first: bool = False) -> None:
        """Queue a request.

        Args:
            first: whether it is served before all others, as urgent as the most urgent of them.

        Raises:
            ValueError: it needs more sequences than may run at once, could not fit an empty pool, asks for something
                that could not be held, or has a priority where none counts.
        """
        if request.priority is not None and self.policy != "priority":
            raise ValueError(f"priority={request.priority} needs scheduling_policy='priority', not {self.policy!r}")
        width = len(request.sequences)
        if width > self.max_num_seqs:
            name = "n" if request.beam is None else "beam_width"
            raise ValueError(f"{name}={width} is above max_num_seqs={self.max_num_seqs}")
        lifetime = self.admission.lifetime(request)
        request.most_pages = self.memory.pages_alone(lifetime)
        self.admission.check(request, lifetime)
        request.compact_placement = self.memory.is_tight(lifetime)
        if first:
            request.arrival_number = -1
            request.priority = min(map(urgency, self.requests), default=None) if self.policy == "priority" else None
        else:
            request.arrival_number = self.num_added
            self.num_added += 1
        if self.tier_prefetch is not None:
            self.tier_prefetch.arrived(request)
        self.queues.put(request)
        # Last: after an exception `restart` must not keep a request that the caller was never given back.
        self._unfinished[request.request_id] = request

    def restore(self, request: Request) -> None:
        """Put an unfinished request, which was saved and keeps its place in the order of arrival, into the queue that
        its status names. The memory has its blocks already, and what it held is cached.

        Where that is lost and memory is short for it, the request is computed again.
        """
        if request.status is Status.RUNNING and not self.allocation.holds.hold(request):
            for seq in request.live:
                self.allocation.drop_any(seq)
            begin_again(request)
        if self.speculation is None:
            for seq in request.sequences:
                seq.needs_host = False  # it awaited drafts, which are not made here
        self._unfinished[request.request_id] = request
        self.queues.put(request)

    # ------------------------------------------------------------------ a step

    def schedule(self) -> ScheduledStep:
        """Plan the next step; it is empty when nothing can run before `update` is called, or nothing is left.

        Running requests come first, in service order. Every decode gets its token before prefills share the
        rest of the budget, so long prompts never hold up running sequences. Swapped requests come back, then
        waiting requests are admitted, in order, while memory above the watermark and what running prompts have yet
        to take lasts; neither in a step that had to preempt, and nothing is admitted while a swapped request waits.

        With priorities a request that waits comes before running ones that are strictly less urgent, and these, the
        last in service order, are preempted where that gives it the room it lacks; nothing is admitted while a swapped
        request waits that is as urgent.

        While drafts are being verified, or are about to be made, nothing is planned: a step without their sequence
        would cost as much, and the sequence would run in every other step only.
        """
        self.constrained.begin_step()
        if self.speculation is not None and any(
            s.needs_host and s.num_pending for r in self.running for s in r.sequences if s.finish_reason is None
        ):
            return ScheduledStep()
        if self.tier_prefetch is not None:
            self.tier_prefetch.begin_step()
        plan = StepPlan(self.max_num_batched_tokens)
        plan.draft_rows = self._draft_rows
        self._plan_running(plan)
        if not (plan.preempted or plan.admission_stopped):
            while (request := self.queues.next_in_line()) is not None and self._try_admit(request, plan):
                pass
        self.allocation.holds.take(plan)
        make_work(self.memory, plan)
        return plan.step()

    @property
    def _draft_rows(self) -> int:
        """Return how many rows of the sampler drafts may take.

        0 while a request is swapped out, or one waits although a row is free: they lack tokens or memory, which drafts
        would take too. Requests that lack a row only do not keep drafts from the rows that no sequence can have.
        """
        free = len(self.allocation.free_rows)
        if self.swapped or (self.waiting and free):
            return 0
        return free + self._rows_for_drafts

    def _plan_running(self, plan: StepPlan) -> None:
        """Plan the next tokens of all running requests, in service order."""
        running, overtakes = self.running, self.policy == "priority"
        in_bulk = self.speculation is None and not (overtakes and self._may_overtake)
        position = plan_decodes(self.queues, 0, plan, self.allocation) if in_bulk else 0
        plan.reserved = decodes_due(running[position:])
        while position < len(running):
            current = running[position]
            admitted = overtakes and self._admit_urgent(current, plan)
            if not admitted and (position == len(running) or running[position] is not current):
                continue  # it was preempted for one that found no place after all, as a prefix on disk takes blocks
            if admitted or self._extend(current, plan):
                position += 1
                if in_bulk:
                    position = plan_decodes(self.queues, position, plan, self.allocation)

    # ------------------------------------------------------------------ into the batch

    def _extend(self, request: Request, plan: StepPlan, *, may_preempt: bool = True) -> bool:
        """Plan the request's next tokens, preempting the last in service order for room.

        Returns False when the request itself was preempted, or, where none may be, has to wait for a step; then no
        token of it is in the plan.
        """
        left, reserved = plan.left, plan.reserved

        def make_room(seq: Sequence, copies: list[BlockCopy]) -> bool:
            if may_preempt:
                return self.preemption.preempt_for(request, seq, plan, copies)
            plan.left, plan.reserved = left, reserved
            plan.add(request, [], copies)  # their blocks are the request's by now
            for other in request.live:
                other.capacity = 0  # the tables were not sent
            return False

        return self._next_tokens.plan(request, plan, make_room)

    @property
    def _may_overtake(self) -> bool:
        """Tell whether a request that waits is strictly more urgent than a running one. Where none is, none will be
        while running ones are planned: those that are preempted come last."""
        ahead = self.queues.next_in_line()
        return ahead is not None and bool(self.running) and urgency(ahead) < urgency(self.running[-1])

    def _admit_urgent(self, running: Request, plan: StepPlan) -> bool:
        """Bring the next in line into the batch before a running request that is strictly less urgent."""
        ahead = self.queues.next_in_line()
        if plan.admission_stopped or ahead is None or urgency(ahead) >= urgency(running):
            return False
        plan.admission_stopped = not self._try_admit(ahead, plan)
        return not plan.admission_stopped

    def _try_admit(self, request: Request, plan: StepPlan) -> bool:
        """Bring the next in line into the batch if rows, budget and memory allow, or would without requests that are
        strictly less urgent, which are preempted then."""
        if any(seq.num_pending or seq.awaits_mask for seq in request.live):
            return False
        return self._resume(request, plan) if request.status is Status.SWAPPED else self._admit(request, plan)

    def _resume(self, request: Request, plan: StepPlan) -> bool:
        """Bring the first swapped request back."""
        if not self.preemption.make_room(request, plan, lambda tokens: tokens >= len(request.live)):
            return False
        if not self.preemption.bring_back(request, plan):
            return False
        self._extend(request, plan, may_preempt=False)
        return True

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Move the first waiting request into the batch."""

        def is_enough(tokens: int) -> bool:
            return tokens > 0 and tokens_before_end(first, min(tokens, self._max_chunk), self._prompt_tail) > 0

        live = request.live
        first = live[0]
        may_preempt = self.running and urgency(request) < urgency(self.running[-1])
        if not may_preempt:  # compare it with the free rows, tokens and blocks first, which is cheap
            free, tokens = len(self.allocation.free_rows), plan.left - plan.reserved
            if len(live) > free or not is_enough(tokens) or not self.admission.may_fit(request):
                return False
        if self._shared_prefills.worth_waiting(request, plan):
            return False
        ahead = self.tier_prefetch
        if ahead is not None and ahead.worth_waiting(request, is_idle=not self.running):
            return False
        planned = None if request.runs_exclusively else self._place(request, live, plan, is_enough, None)
        if planned is None and not self.running:
            # Scattered hits can pin more pages than the sequence needs, and so can what it holds where that is cached.
            # An empty batch must not wait for itself, so try again with pinned tokens only.
            self.allocation.holds.forget(request)
            planned = self._place(request, live, plan, is_enough, self.admission.pinned_tokens(request))
        if planned is None:
            return False
        chunks, copies, left = planned
        plan.left = left + plan.reserved
        for seq in live:
            seq.row = self.allocation.free_rows.pop()
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
            request.num_cached_tokens = first.num_computed
            self.memory.note_misses(
                first.seq_id, len(request.prompt_token_ids), computes_all=request.computes_whole_prompt
            )
            request.tier_tokens = self.memory.tier_tokens(first.seq_id)
        self.memory.admitted(first.seq_id)
        request.end_pause()
        if ahead is not None:
            ahead.admitted(request)
        self.queues.move(request, Status.RUNNING)
        self._next_tokens.put(request, chunks, copies, plan)
        return True

    def _place(
        self,
        request: Request,
        live: list[Sequence],
        plan: StepPlan,
        is_enough: Callable[[int], bool],
        most_cached: int | None,
    ) -> tuple[list[Chunk], list[BlockCopy], int] | None:
        """Return the first chunks of a waiting request after its cached prefix, see `Allocation.place`; None, with
        nothing held, without room."""
        self.allocation.attach(request, live[0], most_cached)
        if not self.preemption.make_room(request, plan, is_enough):
            self.allocation.detach(live[0])
            return None
        ahead = self.tier_prefetch
        if most_cached is None and ahead is not None and ahead.has_read(request):  # only now is there room for all
            leaves = self.memory.leaves(live[0].seq_id)
            self.allocation.detach(live[0])
            self.allocation.attach(request, live[0], None, from_tiers=True)
            self.memory.leave_less(live[0].seq_id, leaves)
        return self.allocation.place(request, live, plan.left - plan.reserved, self._max_chunk, most_cached)

    # ------------------------------------------------------------------ after the step

    def dispatched(self, step: ScheduledStep) -> None:
        """Note that the device has a step: every later step finds the KV that it computes.

        Until then the prefix cache knows none of its blocks, since the step might never run.
        """
        self.memory.dispatched()
        for seq in step.decodes.full:
            self.allocation.commit(seq)
        for chunk in step.others:
            seq = chunk.seq
            if chunk.length > 1 or seq.num_computed >= seq.capacity:
                self.allocation.commit(seq)
        self.allocation.holds.dispatched(step)
        if self.tier_prefetch is not None:
            self.tier_prefetch.dispatched(step)

    def update(
        self, step: ScheduledStep, tokens: Seq[int], logprobs: Seq[float], top: TopTokens | None = None
    ) -> list[Request]:
        """Append a step's sampled tokens to their sequences; return the requests that finished.

        Args:
            top: the most likely tokens, if a request of the step needs them.
        """
        finished: list[Request] = []
        went_on: dict[Sequence, Request] = {}
        if self.tier_prefetch is not None:
            self.tier_prefetch.updated(step)
        now, drafting = time.monotonic(), self._drafting
        # Grammars may raise, so they come first: a token that was appended is trusted by `begin_again`.
        # Which of a sequence's drafts count is known one by one, and a run would stand between them.
        verified = {chunk.seq for chunk in step.others if chunk.drafts} if step.is_constrained else frozenset()
        ended = self.constrained.follow(step, tokens, verified) if step.is_constrained else {}
        number = step.decodes.number
        self._take_decodes(step.decodes, tokens[:number], logprobs[:number], top, now, finished)
        others = zip(step.other_samples, tokens[number:], logprobs[number:], strict=True)
        for row, (sample, token, logprob) in enumerate(others, number):
            request, seq, chunk = sample
            drafts = chunk.drafts
            if step.is_constrained and sample.is_overtaken and not drafts:
                continue
            if not drafts:
                seq.num_pending -= 1
            if seq.finish_reason is not None or (drafts and not drafts_kept(seq, chunk)):
                continue
            if request.first_token_time is None:
                request.first_token_time = now
            if request.beam is not None:
                assert top is not None, "the step was asked for a beam's candidates"
                if offer(request, seq, top.row(row, request.num_top), self.allocation):
                    self._end(request)
                    finished.append(request)
                continue
            if seq.grammar is not None and drafts:
                accept(seq.grammar, token)
            elif seq in ended:
                if self.finish(request, seq, *ended[seq]):
                    finished.append(request)
                continue
            if top is not None and request.params.logprobs is not None:
                seq.logprobs.append((logprob, top.row(row, request.params.logprobs)))
            token_ids = seq.token_ids
            token_ids.append(token)
            seq.cumulative_logprob += logprob
            if seq.row >= 0:
                seq.num_computed += bool(drafts)  # the step computed the draft that this token follows
                if drafts or len(token_ids) >= seq.capacity:
                    self.allocation.commit(seq)  # the token ends a block that a step on its way fills
            stop = None
            if seq.stop_search is not None:
                stop = find_stop(request, seq)
            elif token in request.stop_ids or len(token_ids) >= request.max_total_tokens or seq.grammar is not None:
                stop = token_stop(request, seq)  # all else goes on, which saves a call of every token
            if seq.grammar is not None and stop is None and seq not in verified:
                stop = self._append_forced(request, seq)
            if stop is not None and self.finish(request, seq, *stop):
                finished.append(request)
            if drafting is not None:
                if stop is None:
                    went_on[seq] = request
                drafting.took(seq)
        self.constrained.make_masks()
        if drafting is not None:
            drafting.learn(step, went_on, self._draft_rows)
        return finished

    def _take_decodes(
        self,
        decodes: Decodes,
        tokens: Seq[int],
        logprobs: Seq[float],
        top: TopTokens | None,
        now: float,
        finished: list[Request],
    ) -> None:
        """Append the tokens of plain decodes, which know no drafts, beams or grammars; add the requests that finish to
        `finished`."""
        commit, may_end = self.allocation.commit, self._ends.rows(decodes, tokens, now)
        for row, (seq, token, logprob) in enumerate(zip(decodes.seqs, tokens, logprobs, strict=True)):
            seq.num_pending -= 1
            if seq.finish_reason is not None:
                continue
            if top is not None and (asked := decodes.requests[row].params.logprobs) is not None:
                seq.logprobs.append((logprob, top.row(row, asked)))
            token_ids = seq.token_ids
            token_ids.append(token)
            seq.cumulative_logprob += logprob
            if len(token_ids) >= seq.capacity and seq.row >= 0:
                commit(seq)  # the token ends a block that a step on its way fills
            if row in may_end:
                request = decodes.requests[row]
                stop = find_stop(request, seq)
                if stop is not None and self.finish(request, seq, *stop):
                    finished.append(request)

    def _append_forced(self, request: Request, seq: Sequence) -> Stop | None:
        """Append the tokens that a grammar forces after the newest one; return why one of them ends the sequence."""
        # At least 1: the sequence may have lost its row while its last step was computed.
        batch = max(1, self.max_num_seqs - len(self.allocation.free_rows))
        run = self.constrained.forced(request, seq, batch)
        if run and seq.num_pending:  # the pass ahead computed the newest token; what it draws is the run's first
            seq.num_pending = 0
        if run:
            self.queues.fills(request)
        for token in run:
            self.constrained.append(seq, token)
            if self._drafting is not None:
                self._drafting.took(seq)
            if (stop := find_stop(request, seq)) is not None:
                return stop
        return None

    def finish(self, request: Request, seq: Sequence, reason: FinishReason, stop_reason: str | int | None) -> bool:
        """End one sequence and free its memory; return True when it was the request's last."""
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        self.allocation.release(seq)
        if request.live:
            return False
        self._end(request)
        return True

    def _end(self, request: Request) -> None:
        request.finished_time = time.monotonic()
        self._forget(request)

    def abort(self, request: Request) -> None:
        """Drop a request and free its memory at once. A finished one is left alone."""
        if request.status is Status.FINISHED:
            return
        self._unfinished.pop(request.request_id, None)
        for seq in request.live:
            seq.finish_reason = "abort"
            self.allocation.release(seq)
        self._forget(request)

    def restart(self) -> None:
        """Compute all unfinished requests again from the tokens the host has, over an empty memory.

        Call it after an exception in the middle of a change, or a step that failed. No count, table or cached block can
        be trusted then; the requests' tokens can, and all else follows from them. A request that turns out to have
        ended is finished.
        """
        self.allocation.clear()
        self.constrained.clear()
        if self.tier_prefetch is not None:
            self.tier_prefetch.clear()
        self.queues.clear()
        for request in list(self._unfinished.values()):
            try:
                if request.status is not Status.FINISHED:
                    begin_again(request)
            except Exception:  # its grammar may be the reason that the step failed
                logger.exception("request %d is aborted: its tokens cannot be looked at again", request.request_id)
                for seq in request.live:
                    seq.finish_reason, seq.stop_reason = "abort", "its tokens cannot be looked at again after a failure"
            if request.live:
                self.queues.put(request)
                continue
            request.status = Status.FINISHED
            request.finished_time = request.finished_time or time.monotonic()
            del self._unfinished[request.request_id]

    def _forget(self, request: Request) -> None:
        self.queues.remove(request)
        self.constrained.let_go(request.sequences)
        if self.tier_prefetch is not None:
            self.tier_prefetch.let_go(request)
        self.allocation.holds.release(request)
        request.status = Status.FINISHED
        self._unfinished.pop(request.request_id, None)
