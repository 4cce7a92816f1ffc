"""Whether a request has room in the batch: slots, tokens of the step and blocks, now or ever."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable

from jpaged.memory import Fit, MemoryManager, Relief
from jpaged.scheduling.allocation import Allocation
from jpaged.scheduling.order import urgency
from jpaged.scheduling.request import Request, Sequence, Status
from jpaged.scheduling.step_builder import StepPlan, missing_tokens


class Room:
    """Asks the memory about whole requests.

    Args:
        allocation: the blocks and slots of the running sequences.
        running: the running requests in service order, which the scheduler changes.
    """

    def __init__(self, memory: MemoryManager, allocation: Allocation, running: list[Request]) -> None:
        self._memory = memory
        self._allocation = allocation
        self._running = running

    def is_possible(self, request: Request) -> bool:
        """Tell whether a request can grow to its full length in a pool with nothing but pinned blocks, of which those
        at the beginning of its prompt are its own too."""
        length, images = request.most_computed, request.encoder_tokens
        adapter = 0 if request.adapter is None else request.adapter.num_blocks
        if self._verdict(request, length, encoder_tokens=images, adapter_blocks=adapter) is not Fit.NEVER:
            return True
        pinned = self.pinned_tokens(request)
        fit = self._verdict(request, length, pinned_tokens=pinned, encoder_tokens=images, adapter_blocks=adapter)
        return pinned > 0 and fit is not Fit.NEVER

    def is_tight(self, request: Request) -> bool:
        """Tell whether a request is sure to grow to its full length only where its blocks are packed."""
        shared = len(request.prompt_token_ids)
        return self._memory.is_tight(
            request.most_computed,
            len(request.sequences),
            shared_tokens=shared,
            encoder_tokens=request.encoder_tokens,
            prompt_tokens=shared,
            adapter_blocks=0 if request.adapter is None else request.adapter.num_blocks,
        )

    def pinned_tokens(self, request: Request) -> int:
        """Return how many leading tokens of its prompt the request is sure to find in pinned blocks."""
        if request.computes_whole_prompt:
            return 0
        return self._memory.pinned_prefix(
            request.prompt_token_ids,
            salt=request.prefix_salt,
            encoder_tokens=request.encoder_tokens,
            spans=request.spans,
        )

    def may_fit(self, request: Request) -> bool:
        """Tell whether the request would fit now if all but its last token were found in blocks that others use: a
        first look that costs no search."""
        length = max(seq.num_tokens for seq in request.live)
        cached = length - 1 if self._memory.prefix_caching else 0
        return self._verdict(request, length, cached_tokens=cached, may_wait=bool(self._running)) is Fit.OK

    def fits(self, request: Request, others: list[Request], relief: Relief | None) -> bool:
        """Tell whether a request, of which the first sequence's cached blocks are attached or which is swapped out,
        fits beside `others` and what these have yet to take."""
        most = urgency(request)  # that of the others is read in place: there may be thousands
        reserved = self._outstanding(other for other in others if (other.priority or 0) <= most)
        live = request.live
        if not self._allocation.adapting.has_place(request, others):
            return False
        if request.status is Status.SWAPPED:
            owners = [seq for seq in live if seq.parent is None]
            adapter = self._memory.adapter_needs(self._allocation.adapting.outstanding(request))
            reserved = _sum(reserved, adapter)
            return self._memory.swap_space.has_room(
                [seq.seq_id for seq in owners],
                keep_room=bool(others),
                reserved=_sum(reserved, self._outstanding([request])),
                relief=relief,
            )
        length = max(seq.num_tokens for seq in live)
        fit = self._verdict(
            request,
            length,
            cached_tokens=live[0].num_computed,
            seq_id=live[0].seq_id,
            reserved=reserved,
            may_wait=bool(others),
            relief=relief,
        )
        return fit is Fit.OK

    def find_victims(self, request: Request, plan: StepPlan, is_enough: Callable[[int], bool]) -> list[Request] | None:
        """Return the fewest running requests, the last in service order, without which a request enters; None when
        there is no room without all that are strictly less urgent, either.

        A request that needs the pool for itself enters where nobody runs, and nobody joins it.

        Args:
            is_enough: tells whether so many tokens are enough for the request to begin.
        """
        running = self._running
        most = len(running) - bisect_right(running, urgency(request), key=urgency)
        if self._enters(request, plan, is_enough, 0):
            return []
        if not most or not self._enters(request, plan, is_enough, most):
            return None
        # Whoever enters without some requests also enters without more.
        count = bisect_left(range(most), True, lo=1, key=lambda n: self._enters(request, plan, is_enough, n))
        return running[len(running) - count :][::-1]

    def _enters(self, request: Request, plan: StepPlan, is_enough: Callable[[int], bool], count: int) -> bool:
        """Tell whether a request enters without the last `count` running ones. O(their blocks)."""
        first = len(self._running) - count
        others, victims = self._running[:first], self._running[first:]
        if others and (request.alone or others[0].alone):
            return False
        slots = len(self._allocation.free_slots) + sum(len(victim.live) for victim in victims)
        tokens = plan.left - plan.reserved
        tokens += sum(missing_tokens(victim, seq) == 1 for victim in victims for seq in victim.live)
        if len(request.live) > slots or not is_enough(tokens):
            return False
        return self.fits(request, others, self._relief(request, victims) if victims else None)

    def _relief(self, request: Request, victims: list[Request]) -> Relief:
        """Return what `victims` would free for a request."""
        relief = self._memory.relief()
        for victim in victims:
            for seq in victim.live:
                if seq.parent is None:
                    self._memory.count_relief(relief, seq.seq_id)
            for held in victim.held.values():
                if all(image.digest != held.image.digest for image in request.images):  # else it goes on being held
                    self._memory.count_image_relief(relief, held)
            if victim.held_adapter is not None and not victim.shares_adapter(request):  # else it goes on being held
                self._memory.count_adapter_relief(relief, victim.held_adapter)
        return relief

    def _outstanding(self, requests: Iterable[Request]) -> list[int] | None:
        """Return how many blocks of each group the prompts of `requests` have yet to take; None = no block."""
        reserved = None
        for request in requests:
            for seq in request.sequences:
                # One token more is what every step takes: the watermark is for those.
                if seq.num_computed + 1 < len(seq.token_ids) + seq.num_pending and seq.finish_reason is None:
                    reserved = _sum(reserved, self._to_take(seq))
            if request.images and self._memory.images.stays:
                features = self._allocation.encoding.outstanding(request)
                reserved = _sum(reserved, self._memory.outstanding_image(features))
        return reserved

    def _to_take(self, seq: Sequence) -> list[int]:
        if seq.parent is None:
            return self._memory.outstanding(seq.seq_id, seq.num_tokens)
        holder = seq.parent
        while holder.parent is not None:
            holder = holder.parent
        return self._memory.outstanding_fork(holder.seq_id, seq.num_tokens, seq.fork_at)

    def _verdict(
        self,
        request: Request,
        num_tokens: int,
        *,
        cached_tokens: int = 0,
        pinned_tokens: int = 0,
        encoder_tokens: int | None = None,
        adapter_blocks: int | None = None,
        seq_id: int | None = None,
        reserved: list[int] | None = None,
        may_wait: bool | None = None,
        relief: Relief | None = None,
    ) -> Fit:
        """Return the memory's verdict on the request's live sequences, `num_tokens` each.

        What is attached need not fit beside what is pinned: whether it ever does was asked when the request came.

        Args:
            encoder_tokens: features of the largest image to take blocks for; None = see `Encoding.outstanding`.
            adapter_blocks: blocks to take for its adapter; None = see `Adapting.outstanding`.
        """
        shared = len(request.prompt_token_ids)
        if encoder_tokens is None:
            encoder_tokens = self._allocation.encoding.outstanding(request)
        if adapter_blocks is None:
            adapter_blocks = self._allocation.adapting.outstanding(request)
        return self._memory.can_admit(
            num_tokens,
            len(request.live),
            cached_tokens=cached_tokens,
            shared_tokens=shared,
            encoder_tokens=encoder_tokens,
            adapter_blocks=adapter_blocks,
            prompt_tokens=shared,
            pinned_tokens=max(pinned_tokens, cached_tokens),
            seq_id=seq_id,
            reserved=reserved,
            may_wait=may_wait,
            relief=relief,
        )


def _sum(some: list[int] | None, more: list[int] | None) -> list[int] | None:
    if some is None or more is None:
        return more if some is None else some
    return [a + b for a, b in zip(some, more, strict=True)]
