"""Preemption: which requests return their memory, and how they get it again (PagedAttention, section 4.5).

Recomputation runs prompt and generated tokens as one prefill. Swapping moves the blocks to host memory and back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Literal

from jpaged.memory import BlockCopy, Leaves
from jpaged.scheduling.admission import Admission
from jpaged.scheduling.allocation import Allocation
from jpaged.scheduling.queues import Queues
from jpaged.scheduling.request import Request, Sequence, Status
from jpaged.scheduling.step import StepPlan, missing_tokens
from jpaged.scheduling.work import SWAP_IN, SWAP_OUT

logger = logging.getLogger(__name__)

PreemptionMode = Literal["recompute", "swap", "auto"]


class Preemption:
    """Preempts running requests, the last in service order first, each with all its sequences, and brings swapped
    requests back.

    Args:
        admission: finds the requests that have to go for another one.
        mode: "auto" swaps requests of several live sequences, whose shared blocks recomputation would compute for each
            of them, and recomputes the others. Where host memory is short a request is recomputed.

    Attributes:
        num_recomputes, num_swaps: preemptions so far, by kind.
    """

    def __init__(self, queues: Queues, allocation: Allocation, admission: Admission, mode: PreemptionMode) -> None:
        self.mode = mode
        self.num_recomputes = 0
        self.num_swaps = 0
        self._queues = queues
        self._allocation = allocation
        self._admission = admission

    def make_room(self, request: Request, plan: StepPlan, is_enough: Callable[[int], bool]) -> bool:
        """Preempt the requests that have to go for another one to enter; return False, with none preempted, where it
        could not enter. See `Admission.find_victims`.

        None waits or is preempted for the sake of later requests: one that does not fit leaves less for these, where
        fewer have to go for it then.
        """
        victims = self._admission.find_victims(request, plan, is_enough)
        memory, first = self._allocation.memory, request.live[0].seq_id
        if victims != [] and memory.leave_less(first):
            fewer = self._admission.find_victims(request, plan, is_enough)
            if fewer == victims:
                memory.leave_all(first)
            victims = fewer
        if victims is None and not self._queues.running and memory.leave_less(first, Leaves.NOTHING):
            victims = self._admission.find_victims(request, plan, is_enough)
        for _ in victims or ():
            self.preempt_last(plan)
        return victims is not None

    def preempt_for(self, request: Request, seq: Sequence, plan: StepPlan, copies: list[BlockCopy]) -> bool:
        """Preempt the last running request for one that is being planned; return False when they are the same.

        Args:
            copies: those planned for the request so far.
        """
        if self._queues.running == [request]:
            # It lacks blocks though it has the pool to itself: fragmentation. Next time it runs alone, compactly.
            request.runs_exclusively = request.compact_placement = True
            self._allocation.memory.pack(seq.seq_id)
        return self.preempt_last(plan, request, copies) is not request

    def preempt_last(self, plan: StepPlan, planned: Request | None = None, unmade: Seq[BlockCopy] = ()) -> Request:
        """Preempt and return the last running request.

        Args:
            planned: the request that is being planned, for which the copies in `unmade` were planned in this step.
        """
        victim = self._queues.take_last()
        self.take_back(victim, plan, list(unmade) if victim is planned else [])
        self._queues.put(victim)
        return victim

    def take_back(self, request: Request, plan: StepPlan, unmade: list[BlockCopy]) -> None:
        """Take the memory of a request, which is in no queue; its status says how it will return.

        Args:
            unmade: copies planned for the request in this step, which are cancelled.
        """
        live = request.live
        logger.debug("request %d is preempted", request.request_id)
        plan.preempted.append(request)
        plan.reserved -= sum(missing_tokens(request, seq) == 1 for seq in live)
        request.pause()
        self._allocation.holds.release(request)
        swaps = self.mode == "swap" or (self.mode == "auto" and len(live) > 1)
        moved = self._allocation.swap_out(live, unmade) if swaps else None
        self._allocation.memory.cancel(unmade)
        if moved is not None:
            plan.add_work(SWAP_OUT, moved)
            request.status = Status.SWAPPED
            request.num_swaps += 1
            self.num_swaps += 1
            return
        for seq in live:
            self._allocation.release(seq)
            seq.num_computed = 0
        request.status = Status.WAITING
        self.num_recomputes += 1

    def bring_back(self, request: Request, plan: StepPlan) -> bool:
        """Give a swapped request, which was found to have room, its rows and memory again; return False where memory
        is short for its holds, so that it is preempted once more.

        Its tokens of the step before it was preempted have reached the host by then.
        """
        live = request.live
        plan.add_work(SWAP_IN, self._allocation.swap_in(live))
        plan.reserved += sum(missing_tokens(request, seq) == 1 for seq in live)
        self._queues.remove(request)
        request.status = Status.RUNNING
        request.end_pause()
        has_holds = self._allocation.holds.hold(request)
        if not has_holds:
            self.take_back(request, plan, [])  # by recomputation: its blocks are not filled yet
        self._queues.put(request)
        return has_holds
