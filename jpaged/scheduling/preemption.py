"""How a request gives its memory back, and by which way it returns (PagedAttention, section 4.5).

Recomputation runs prompt + generated as one prefill. Swapping moves the blocks to host memory and back.
"""

from __future__ import annotations

import logging
from typing import Literal

from jpaged.memory import BlockCopy
from jpaged.scheduling.allocation import Allocation
from jpaged.scheduling.request import Request, Status
from jpaged.scheduling.step_plan import StepPlan, missing_tokens

logger = logging.getLogger(__name__)

PreemptionMode = Literal["recompute", "swap", "auto"]


class Preemption:
    """Takes back all memory of a request, or brings back what was swapped out.

    Args:
        mode: "auto" swaps requests of several live sequences, whose shared blocks recomputation would compute
            for each of them, and recomputes the others. Where host memory is short a request is recomputed.

    Attributes:
        num_recomputes, num_swaps: preemptions so far, by kind.
    """

    def __init__(self, allocation: Allocation, mode: PreemptionMode) -> None:
        self.allocation = allocation
        self.mode = mode
        self.num_recomputes = 0
        self.num_swaps = 0

    def take_back(self, request: Request, plan: StepPlan, unmade: list[BlockCopy]) -> None:
        """Preempt a running request; its status tells how it will return.

        Args:
            unmade: copies planned for the request in this step, which will not be made.
        """
        live = request.live
        logger.debug("request %d gives its memory back", request.request_id)
        plan.preempted.append(request)
        plan.reserved -= sum(missing_tokens(request, seq) == 1 for seq in live)
        request.pause()
        self.allocation.encoding.let_go(request)
        self.allocation.adapting.let_go(request)
        swaps = self.mode == "swap" or (self.mode == "auto" and len(live) > 1)
        if swaps and not plan.swap_in:  # the host blocks that these leave are read after all that goes out is written
            moved = self.allocation.swap_out(live, unmade)
            if moved is not None:
                plan.swap_out += moved
                request.status = Status.SWAPPED
                request.num_swaps += 1
                self.num_swaps += 1
                return
        for seq in live:
            self.allocation.release(seq)
            seq.num_computed = 0
        request.status = Status.WAITING
        self.num_recomputes += 1

    def bring_back(self, request: Request, plan: StepPlan) -> None:
        """Give a swapped request that has room its slots and memory again.

        Its tokens of the step before it was preempted have reached the host by then.
        """
        live = request.live
        plan.swap_in += self.allocation.swap_in(live)
        plan.reserved += sum(missing_tokens(request, seq) == 1 for seq in live)
        request.status = Status.RUNNING
        request.end_pause()
