"""Admission: whether a request has room in the batch, and whether it should wait for a prefill that it can share."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from jpaged.memory import Fit, Lifetime, MemoryManager, Need, ReclaimEstimate
from jpaged.memory.hash_chain import in_common, last_end
from jpaged.memory.prefix_prediction import STEP_OVERHEAD
from jpaged.scheduling.allocation import Allocation
from jpaged.scheduling.held import Holds
from jpaged.scheduling.queues import Queues, service_order, urgency
from jpaged.scheduling.request import Request, Sequence, Status
from jpaged.scheduling.step import StepPlan, missing_tokens


class NoRoom(ValueError):
    """A request could never fit a pool of nothing but pinned blocks."""


class Admission:
    """Decides whether a request has room: rows, tokens of the step and blocks, now or ever. It only asks and changes
    nothing.

    Args:
        allocation: the blocks and rows of the running sequences.
        queues: the requests.
    """

    def __init__(self, allocation: Allocation, queues: Queues) -> None:
        self._memory = allocation.memory
        self._allocation = allocation
        self._queues = queues
        self._running = queues.running
        self._holds = allocation.holds

    def check(self, request: Request, lifetime: Lifetime) -> None:
        """Refuse a request that could never be served.

        Raises:
            NoRoom: it could not fit a pool of nothing but pinned blocks.
            ValueError: it asks for something that could not be held.
        """
        self._holds.check(request)
        if not self._can_grow(request, lifetime):
            layout, width = self._memory.layout, len(request.sequences)
            several = f" in each of {width} sequences" if width > 1 else ""
            raise NoRoom(
                f"a request of {len(request.prompt_token_ids)} prompt tokens that may grow to "
                f"{request.max_total_tokens} tokens{several} can never fit the pool of {layout.num_pages} large pages "
                f"of {layout.page_bytes:,} bytes; raise kv_cache_memory_bytes or memory_utilization, or lower "
                "max_tokens"
            )

    def lifetime(self, request: Request) -> Lifetime:
        """Return the most that a request will ever take; computed once, when the request is queued.

        Raises:
            ValueError: it asks for something that no layer group keeps.
        """
        return Lifetime(
            request.most_computed,
            len(request.live),  # a restored request may have sequences that ended
            len(request.prompt_token_ids),
            request.encoder_tokens,
            self._holds.lifetime(request),
            request.kept_tokens,
        )

    def need(self, request: Request) -> Need:
        """Return what a request takes now. Its first sequence's prefix is attached, or it is swapped out."""
        live = request.live
        return self._need(request, live, max(seq.num_tokens for seq in live), live[0].num_computed, live[0].seq_id)

    def is_possible(self, request: Request, lifetime: Lifetime, pinned_pages: int | None = None) -> bool:
        """Tell whether a request can grow to its full length in a pool that holds only pinned blocks. A pinned prefix
        of its prompt counts as its own.

        Args:
            pinned_pages: see `MemoryManager.is_possible`.
        """
        if self._memory.is_possible(lifetime, pinned_pages=pinned_pages):
            return True
        pinned = self.pinned_tokens(request)
        return pinned > 0 and self._memory.is_possible(lifetime, pinned_tokens=pinned, pinned_pages=pinned_pages)

    def leaves_room(self) -> bool:
        """Tell whether every accepted request can still grow to its full length."""
        return all(map(self._can_grow, self._queues.requests))

    def _can_grow(self, request: Request, lifetime: Lifetime | None = None) -> bool:
        """Return `is_possible` for a request that was added or restored; what it takes was counted when it was added,
        as each pinned breakpoint asks for all requests."""
        pages = request.most_pages
        if pages is not None and pages <= self._memory.num_lasting_pages:
            return True
        return self.is_possible(request, lifetime or self.lifetime(request))

    def pinned_tokens(self, request: Request) -> int:
        """Return how many leading tokens of its prompt the request is sure to find in pinned blocks."""
        if request.computes_whole_prompt:
            return 0
        name = self._holds.prefix(request)
        return self._memory.pinned_prefix(
            request.prompt_token_ids, salt=name.salt, encoder_tokens=request.encoder_tokens, spans=name.spans
        )

    def may_fit(self, request: Request) -> bool:
        """Tell whether the request would fit now if the cache held all its tokens but the last and it left nothing for
        later ones. It is a cheap upper bound, without a search of the cache."""
        live = request.live
        length = max(seq.num_tokens for seq in live)
        need = self._need(request, live, length, length - 1 if self._memory.prefix_caching else 0)
        return self._memory.can_admit(need._replace(leaves_nothing=True), may_wait=bool(self._running)) is Fit.OK

    def fits(self, request: Request, need: Need, others: list[Request], reclaimed: ReclaimEstimate | None) -> bool:
        """Tell whether a request fits together with `others` and the blocks that these have yet to take. The cached
        blocks of its first sequence are attached, or it is swapped out."""
        reserved = self._outstanding(other for other in self._filling(others) if urgency(other) <= urgency(request))
        if not self._holds.has_place(request, others):
            return False
        if request.status is Status.SWAPPED:
            owners = [seq.seq_id for seq in request.live if seq.parent is None]
            reserved = _sum(reserved, self._outstanding([request]))
            return self._memory.swap_space.has_room(
                owners, keep_room=bool(others), reserved=reserved, reclaimed=reclaimed
            )
        fit = self._memory.can_admit(need, reserved=reserved, may_wait=bool(others), reclaimed=reclaimed)
        return fit is Fit.OK

    def find_victims(self, request: Request, plan: StepPlan, is_enough: Callable[[int], bool]) -> list[Request] | None:
        """Return the fewest running requests, the last in service order, that have to be preempted for a request to
        enter; None when preempting all strictly less urgent ones is not enough.

        A request that runs exclusively enters an empty batch only, and none joins it.

        Args:
            is_enough: tells whether so many tokens are enough for the request to begin.
        """
        running, need = self._running, self.need(request)
        most = len(running) - bisect_right(running, urgency(request), key=urgency)

        def enters(count: int) -> bool:
            return self._enters(request, need, plan, is_enough, count)

        if enters(0):
            return []
        if not most or not enters(most):
            return None
        # Fit is monotonic: preempting more requests never makes it worse, so bisect.
        count = bisect_left(range(most), True, lo=1, key=enters)
        return running[len(running) - count :][::-1]

    def _enters(
        self, request: Request, need: Need, plan: StepPlan, is_enough: Callable[[int], bool], count: int
    ) -> bool:
        """Tell whether a request enters without the last `count` running ones. O(their blocks)."""
        first = len(self._running) - count
        others, victims = self._running[:first], self._running[first:]
        if others and (request.runs_exclusively or others[0].runs_exclusively):
            return False
        rows = len(self._allocation.free_rows) + sum(len(victim.live) for victim in victims)
        tokens = plan.left - plan.reserved
        tokens += sum(missing_tokens(victim, seq) == 1 for victim in victims for seq in victim.live)
        if len(request.live) > rows or not is_enough(tokens):
            return False
        return self.fits(request, need, others, self._reclaimed(request, victims) if victims else None)

    def _reclaimed(self, request: Request, victims: list[Request]) -> ReclaimEstimate:
        """Estimate the blocks that preempting `victims` would free for a request."""
        estimate = self._memory.reclaim_estimate()
        for victim in victims:
            for seq in victim.live:
                if seq.parent is None:
                    estimate.add_sequence(seq.seq_id)
            self._holds.add_reclaimed(estimate, victim, request)
        return estimate

    def _filling(self, others: list[Request]) -> list[Request]:
        """Return those of `others`, the first running requests, that may have more than one token to compute, or hold
        something. There may be thousands of others, so none of them is looked at again once its prompt is computed."""
        filling = self._queues.filling
        for request in [request for request in filling if not request.asks and not any(map(_is_filling, request.live))]:
            del filling[request]
        if len(others) == len(self._running):
            return list(filling)
        last = service_order(others[-1]) if others else None
        return [request for request in filling if last is not None and service_order(request) <= last]

    def _outstanding(self, requests: Iterable[Request]) -> list[int] | None:
        """Return how many blocks of each group the prompts of `requests` have yet to take; None = no block."""
        reserved = None
        for request in requests:
            for seq in request.sequences:
                if seq.finish_reason is None and _is_filling(seq):
                    reserved = _sum(reserved, self._to_take(seq))
            if request.asks:
                reserved = _sum(reserved, self._holds.outstanding(request))
        return reserved

    def _to_take(self, seq: Sequence) -> list[int]:
        if seq.parent is None:
            return self._memory.outstanding(seq.seq_id, seq.num_tokens)
        holder = seq.parent
        while holder.parent is not None:
            holder = holder.parent
        return self._memory.outstanding_fork(holder.seq_id, seq.num_tokens, seq.fork_at)

    def _need(
        self, request: Request, live: list[Sequence], num_tokens: int, cached_tokens: int, seq_id: int | None = None
    ) -> Need:
        """Return the need of its live sequences, with `num_tokens` tokens each."""
        return Need(
            num_tokens,
            len(live),
            len(request.prompt_token_ids),
            request.encoder_tokens,
            self._holds.to_enter(request),
            cached_tokens,
            seq_id,
        )


def _is_filling(seq: Sequence) -> bool:
    """Tell whether a sequence has more to compute than the one token that every step takes, which the watermark
    covers."""
    return seq.num_computed + 1 < len(seq.token_ids) + seq.num_pending


def _sum(some: list[int] | None, more: list[int] | None) -> list[int] | None:
    if some is None or more is None:
        return more if some is None else some
    return [a + b for a, b in zip(some, more, strict=True)]


class SharedPrefills:
    """Weighs the steps that a request saves by waiting for the prefill of another against those that the wait costs.

    Args:
        holds: names prefixes.
        budget: most tokens of a step.
        max_chunk: most tokens of one prompt in one step.
    """

    def __init__(self, memory: MemoryManager, holds: Holds, budget: int, max_chunk: int) -> None:
        self._memory = memory
        self._holds = holds
        self._budget = budget
        self._max_chunk = min(max_chunk, budget)

    def worth_waiting(self, request: Request, plan: StepPlan) -> bool:
        """Tell whether a request that could be admitted should rather wait for a prefill of this step, or one that
        has begun and gets no tokens in this step.

        The wait ends with that prefill. A request waits only for requests before it in service order, and none of these
        is added while it waits, so no request waits for ever.
        """
        if not (plan.prefills or plan.begun) or not self._memory.prefix_caching or request.computes_whole_prompt:
            return False
        tokens = request.live[0].token_ids
        shared, computed = self._longest_shared(request, tokens, plan)
        if not shared:
            return False
        name = self._holds.prefix(request)
        cached = self._memory.cached_prefix(tokens, salt=name.salt, spans=name.spans)
        cached = min(shared, cached)
        rest, missing = max(0, shared - computed), len(tokens) - cached
        alone = max(_steps(missing, self._max_chunk), 1 + _steps(missing + rest - plan.left, self._budget))
        after = 1 + _steps(rest, self._max_chunk) + _steps(len(tokens) - shared, self._max_chunk)
        return cached < shared and shared - cached >= (after - alone) * STEP_OVERHEAD

    def _longest_shared(self, request: Request, tokens: Seq[int], plan: StepPlan) -> tuple[int, int]:
        """Return (tokens that the request shares with a prefill, can find as a prefix then and that are computed by it
        from this step on, tokens that it has computed after this step); zeros where there are none."""
        step, name = self._memory.layout.prefix_step, self._holds.prefix(request)
        most, computed = 0, 0
        for other, chunk in plan.prefills + plan.begun:
            theirs = chunk.seq.token_ids
            if theirs[:step] != tokens[:step] or service_order(other) > service_order(request):
                continue
            others_name = self._holds.prefix(other)
            if others_name.salt != name.salt:
                continue
            shared = min(common_prefix(theirs, tokens), len(tokens) - 1)
            if name.spans or others_name.spans:
                shared = in_common(name.spans, others_name.spans, shared)
            shared = last_end(shared, name.spans, step)
            shared = self._memory.prefix_to_come(chunk.seq.seq_id, shared)
            if shared > max(most, chunk.start):
                most, computed = shared, chunk.start + chunk.length
        return most, computed


def common_prefix(a: Seq[int], b: Seq[int]) -> int:
    """Return how many leading tokens two lists have in common."""
    equal, unknown = 0, min(len(a), len(b))
    if a[:unknown] == b[:unknown]:
        return unknown
    while unknown - equal > 1:  # they differ before `unknown`
        middle = (equal + unknown) // 2
        if a[equal:middle] == b[equal:middle]:
            equal = middle
        else:
            unknown = middle
    return equal


def _steps(tokens: int, most: int) -> int:
    return -(-max(0, tokens) // most)
