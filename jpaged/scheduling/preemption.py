"""How a request gives its memory back, and by which way it returns (PagedAttention, section 4.5).

Recomputation runs prompt + generated as one prefill. Swapping moves the blocks to host memory and back.
"""

from __future__ import annotations

from typing import Literal

from jpaged.memory import BlockCopy
from jpaged.scheduling.holdings import Holdings
from jpaged.scheduling.plan import StepPlan, missing_tokens
from jpaged.scheduling.request import Request, Status

PreemptionMode = Literal["recompute", "swap", "auto"]


class Preemption:
    """Takes back all memory of a request, or brings back what was swapped out.

    Args:
        mode: "auto" swaps requests of several live sequences, whose shared blocks recomputation would compute
            for each of them, and recomputes the others. Where host memory is short a request is recomputed.

    Attributes:
        num_recomputes, num_swaps: preemptions so far, by kind.
    """

    def __init__(self, holdings: Holdings, mode: PreemptionMode) -> None:
        self.holdings = holdings
        self.mode = mode
        self.num_recomputes = 0
        self.num_swaps = 0

    def take_back(self, request: Request, plan: StepPlan, unmade: list[BlockCopy]) -> None:
        """Preempt a running request; its status tells how it will return.

        Args:
            unmade: copies planned for the request in this step, which will not be made.
        """
        live = request.live
        plan.preempted.append(request)
        plan.reserved -= sum(missing_tokens(request, seq) == 1 for seq in live)
        request.num_preemptions += 1
        if self.mode == "swap" or (self.mode == "auto" and len(live) > 1):
            moved = self.holdings.swap_out(live, unmade)
            if moved is not None:
                plan.swap_out += moved
                request.status = Status.SWAPPED
                request.num_swaps += 1
                self.num_swaps += 1
                return
        for seq in live:
            self.holdings.release(seq)
            seq.num_computed = 0
        request.status = Status.WAITING
        self.num_recomputes += 1

    def bring_back(self, request: Request, plan: StepPlan, *, keep_room: bool) -> bool:
        """Give a swapped request its memory again, all or nothing, if slots, budget and memory allow.

        Its tokens of the step before it was preempted have reached the host by then.

        Args:
            keep_room: only where every sequence can append a token and the watermark stays free.
        """
        live = request.live
        if plan.left < len(live) or any(seq.num_pending for seq in live):
            return False
        moved = self.holdings.swap_in(live, keep_room=keep_room)
        if moved is None:
            return False
        plan.swap_in += moved
        plan.reserved += sum(missing_tokens(request, seq) == 1 for seq in live)
        request.status = Status.RUNNING
        return True
