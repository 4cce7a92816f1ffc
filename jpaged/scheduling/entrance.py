"""How requests come into the batch: swapped ones back, waiting ones in, urgent ones before less urgent ones."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Seq

from jpaged.memory import BlockCopy
from jpaged.scheduling.allocation import Allocation, tokens_before_end
from jpaged.scheduling.disk_prefetch import DiskPrefetch
from jpaged.scheduling.order import service_order, urgency
from jpaged.scheduling.planning import NextTokens
from jpaged.scheduling.preemption import Preemption
from jpaged.scheduling.request import Request, Sequence, Status
from jpaged.scheduling.room import Room
from jpaged.scheduling.shared_prefills import SharedPrefills
from jpaged.scheduling.step import Chunk
from jpaged.scheduling.step_plan import StepPlan


class Entrance:
    """The queues of requests and the ways between them; `Scheduler` makes the parts and plans the steps.

    Attributes:
        waiting, running, swapped: the unfinished requests, each list in service order.
        allocation: the blocks and slots of the running sequences.
        room: says whether a request has room in the batch.
        disk_prefetch: reads blocks from disk for requests that wait.
    """

    waiting: list[Request]
    running: list[Request]
    swapped: list[Request]
    allocation: Allocation
    preemption: Preemption
    room: Room
    disk_prefetch: DiskPrefetch
    _next_tokens: NextTokens
    _shared_prefills: SharedPrefills
    _max_chunk: int
    _prompt_tail: int

    def _extend(self, request: Request, plan: StepPlan, *, may_preempt: bool = True) -> bool:
        """Plan the request's next tokens, preempting the last in service order for room.

        Returns False when the request itself had to go, or, where nothing may be preempted, to wait for a step;
        then no token of it is in the plan.
        """
        left, reserved = plan.left, plan.reserved

        def make_room(seq: Sequence, copies: list[BlockCopy]) -> bool:
            return self._give_way(request, seq, plan, copies, may_preempt, left, reserved)

        return self._next_tokens.plan(request, plan, make_room)

    def _next_in_line(self) -> Request | None:
        """Return the swapped or waiting request that comes into the batch before all others."""
        if self.swapped and not (self.waiting and urgency(self.waiting[0]) < urgency(self.swapped[0])):
            return self.swapped[0]
        return self.waiting[0] if self.waiting else None

    def _overtake(self, request: Request, plan: StepPlan) -> bool:
        """Bring the next in line into the batch before a running request that is strictly less urgent."""
        ahead = self._next_in_line()
        if plan.closed or ahead is None or urgency(ahead) >= urgency(request):
            return False
        plan.closed = not self._enter(ahead, plan)
        return not plan.closed

    def _enter(self, request: Request, plan: StepPlan) -> bool:
        """Bring the next in line into the batch if slots, budget and memory allow, or would without requests that are
        strictly less urgent, which are preempted then."""
        if any(seq.num_pending for seq in request.live):
            return False
        return self._resume(request, plan) if request.status is Status.SWAPPED else self._admit(request, plan)

    def _make_room(self, request: Request, plan: StepPlan, is_enough: Callable[[int], bool]) -> bool:
        """Preempt those that have to go for a request to enter, if it can; see `Room.find_victims`."""
        victims = self.room.find_victims(request, plan, is_enough)
        for _ in victims or ():
            self._preempt_last(plan)
        return victims is not None

    def _resume(self, request: Request, plan: StepPlan) -> bool:
        """Bring the first swapped request back."""
        if not self._make_room(request, plan, lambda tokens: tokens >= len(request.live)):
            return False
        self.preemption.bring_back(request, plan)
        self.swapped.remove(request)
        if not self.allocation.adapting.hold(request):  # it does not go out again by the way it came: that is in use
            self.preemption.take_back(request, plan, [])
            insort(self._queue(request), request, key=service_order)
            return False
        insort(self.running, request, key=service_order)
        self._extend(request, plan, may_preempt=False)
        return True

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Move the first waiting request into the batch."""

        def is_enough(tokens: int) -> bool:
            return tokens > 0 and tokens_before_end(first, min(tokens, self._max_chunk), self._prompt_tail) > 0

        live = request.live
        first = live[0]
        if not (self.running and urgency(request) < urgency(self.running[-1])):  # it has to do with what is free
            slots, tokens = self.allocation.free_slots, plan.left - plan.reserved
            if len(live) > len(slots) or not is_enough(tokens) or not self.room.may_fit(request):
                return False
        if self._shared_prefills.worth_waiting(request, plan):
            return False
        if self.disk_prefetch.worth_waiting(request, is_idle=not self.running):
            return False
        planned = None if request.alone else self._place(request, live, plan, is_enough, None)
        if planned is None and not self.running:
            # Scattered hits can pin more pages than the sequence needs, and so can an adapter that is there already: an
            # empty batch must not wait for itself.
            self.allocation.adapting.forget(request)
            planned = self._place(request, live, plan, is_enough, self.room.pinned_tokens(request))
        if planned is None:
            return False
        chunks, copies, left = planned
        plan.left = left + plan.reserved
        for seq in live:
            seq.slot = self.allocation.free_slots.pop()
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
            request.num_cached_tokens = first.num_computed
        request.status = Status.RUNNING
        request.end_pause()
        self.disk_prefetch.let_go(request)
        self.waiting.remove(request)
        insort(self.running, request, key=service_order)
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
        """Return the first chunks of a waiting request behind what the cache holds, see `Allocation.place`; None (and
        nothing held) without room."""
        self.allocation.attach(request, live[0], most_cached)
        if not self._make_room(request, plan, is_enough):
            self.allocation.detach(live[0])
            return None
        if most_cached is None and self.disk_prefetch.has_read(request):  # not before there is room for all of it
            self.allocation.detach(live[0])
            self.allocation.attach(request, live[0], None, from_disk=True)
        return self.allocation.place(request, live, plan.left - plan.reserved, self._max_chunk, most_cached)

    def _give_way(
        self,
        request: Request,
        seq: Sequence,
        plan: StepPlan,
        copies: list[BlockCopy],
        may_preempt: bool,
        left: int,
        reserved: int,
    ) -> bool:
        """Make room for a request that is being planned by preempting the last one; return False when it is itself that
        has to go or to wait.

        Args:
            copies: those planned for it so far.
            left, reserved: what the plan had before it.
        """
        if not may_preempt:
            plan.left, plan.reserved = left, reserved
            plan.add(request, [], copies)
            for other in request.live:
                other.capacity = 0  # the tables were not sent
            return False
        if self.running == [request]:
            request.alone = request.packed = True
            self.allocation.memory.pack(seq.seq_id)
        return self._preempt_last(plan, request, copies) is not request

    def _preempt_last(self, plan: StepPlan, planned: Request | None = None, unmade: Seq[BlockCopy] = ()) -> Request:
        """Preempt and return the last running request.

        Args:
            planned: the request that a step is being planned for, with the copies in `unmade`.
        """
        victim = self.running.pop()
        self.preemption.take_back(victim, plan, list(unmade) if victim is planned else [])
        insort(self._queue(victim), victim, key=service_order)
        return victim

    def _queue(self, request: Request) -> list[Request]:
        queues = {Status.RUNNING: self.running, Status.SWAPPED: self.swapped, Status.WAITING: self.waiting}
        return queues[request.status]
