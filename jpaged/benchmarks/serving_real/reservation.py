"""Makes the real engine reserve a contiguous region a request, as Orca does, and hold it to that.

KV is computed and read in blocks as ever; but a request enters only where a buddy allocator over as many token slots as
the pool has gives it its region. So policies differ in what they admit, and in nothing that is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jpaged.benchmarks.memory_contiguous import Buddy, Reservation
from jpaged.memory import BlockCopy, Fit, MemoryManager, PoolLayout
from jpaged.scheduling import Request, ScheduledStep, Scheduler
from jpaged.scheduling.step_builder import StepPlan


class ReservingMemory(MemoryManager):
    """Gives a sequence blocks only within a region of slots that it gets at its first allocation and keeps to its end.

    Args:
        layout: how the pool is cut.
        slots: tokens of all layers that the pool holds.
        reserve: how many slots a request gets; regions are rounded up to powers of two, and to a block at least.
        lengths: tells the prompt and output tokens of a request by its id: a real system is told or guesses.
        block_size: tokens of a block.

    Attributes:
        reserved: slots that each sequence asked for, by its id.
    """

    def __init__(
        self,
        layout: PoolLayout,
        slots: int,
        reserve: Reservation,
        lengths: Callable[[int], tuple[int, int]],
        *,
        block_size: int,
        max_step_tokens: int,
    ) -> None:
        self._slots = slots // block_size * block_size
        self._reserve = reserve
        self._lengths = lengths
        self._block_size = block_size
        self._requests_of: dict[int, int] = {}
        super().__init__(layout, watermark=0.0, max_step_tokens=max_step_tokens)

    def clear(self) -> None:
        super().clear()
        self._regions = Buddy(self._slots)
        self._where: dict[int, tuple[int, int]] = {}
        self.reserved: dict[int, int] = {}
        self._requests_of.clear()

    def region(self, prompt: int, output: int) -> int:
        """Return how many slots a request asks for."""
        return max(self._block_size, self._reserve(prompt, output))

    def can_admit(self, num_tokens: int, num_seqs: int = 1, **demand: Any) -> Fit:
        """Tell whether a region could ever be had; whether it is there now is found out by `allocate`."""
        prompt = min(demand.get("prompt_tokens") or num_tokens, num_tokens)
        region = self.region(prompt, max(1, num_tokens - prompt))
        if not self._regions.fits(region) or num_tokens > region:
            return Fit.NEVER
        return Fit.OK

    def add(self, seq_id: int, request_id: int, **options: Any) -> None:
        super().add(seq_id, request_id, **options)
        self._requests_of[seq_id] = request_id

    def allocate(self, seq_id: int, num_tokens: int, *, first_write: int) -> list[BlockCopy] | None:
        """Give a sequence slots; None where there is no region for it.

        Raises:
            ValueError: it would grow out of its region.
        """
        taken = None
        if seq_id not in self._where:
            slots = self.region(*self._lengths(self._requests_of[seq_id]))
            taken = self._regions.take(slots)
            if taken is None:
                return None
            self._where[seq_id], self.reserved[seq_id] = taken, slots
        if num_tokens > self.reserved[seq_id]:
            raise ValueError(f"num_tokens={num_tokens} is above the {self.reserved[seq_id]} slots of its region")
        copies = super().allocate(seq_id, num_tokens, first_write=first_write)
        if copies is None and taken is not None:
            self._give_back(seq_id)
        return copies

    def free(self, seq_id: int) -> None:
        super().free(seq_id)
        self._give_back(seq_id)
        self._requests_of.pop(seq_id, None)

    def _give_back(self, seq_id: int) -> None:
        region = self._where.pop(seq_id, None)
        if region is not None:
            self._regions.give_back(*region)
            del self.reserved[seq_id]


class ReservingScheduler(Scheduler):
    """Tells its memory how long requests will be."""

    @classmethod
    def over(
        cls,
        layout: PoolLayout,
        slots: int,
        reserve: Reservation,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> ReservingScheduler:
        """Return a scheduler over a memory of its own; arguments are those of `ReservingMemory` and `Scheduler`."""
        scheduler: ReservingScheduler

        def lengths(request_id: int) -> tuple[int, int]:
            return scheduler.lengths(request_id)

        memory = ReservingMemory(
            layout, slots, reserve, lengths, block_size=block_size, max_step_tokens=max_num_batched_tokens
        )
        scheduler = cls(memory, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        return scheduler

    def lengths(self, request_id: int) -> tuple[int, int]:
        """Return the prompt tokens of an unfinished request, and the most that it may generate."""
        request: Request = self._unfinished[request_id]
        prompt = len(request.prompt_token_ids)
        return prompt, request.max_total_tokens - prompt


class RequestLevelScheduler(ReservingScheduler):
    """Lets nobody in while a batch runs, as FasterTransformer: a batch is what the first step after another's end can
    begin."""

    _is_open = True

    def schedule(self) -> ScheduledStep:
        self._is_open = not self.running
        return super().schedule()

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        return self._is_open and super()._admit(request, plan)
