"""Ways to serve requests, each the real scheduler over a memory of its own: paged, Orca's, FasterTransformer's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

from jpaged.benchmarks.memory_contiguous import (
    Buddy,
    ContiguousMemory,
    Regions,
    Reservation,
    oracle,
    powers_of_two,
)
from jpaged.benchmarks.serving_sim.models import Served
from jpaged.benchmarks.serving_sim.policy import BUDGET, Job, Policy
from jpaged.benchmarks.serving_sim.workload import Ask
from jpaged.memory import MemoryManager, PoolLayout
from jpaged.scheduling import Request, ScheduledStep


@dataclass
class _Lengths:
    """Tells a contiguous memory the lengths of sequences, which a real system is told or guesses."""

    known: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __getitem__(self, seq_id: int) -> tuple[int, int]:
        return self.known[seq_id]


class Contiguous(Policy):
    """Reserves a contiguous region for each sequence (Orca); several outputs of a prompt share nothing.

    Args:
        longest: most tokens of a sequence.
        copied: share of a beam request's sequences that go on from another one's tokens in a step, each of which is
            copied as a whole.
    """

    def __init__(
        self,
        name: str,
        regions: Buddy | Regions,
        reserve: Reservation,
        longest: int,
        *,
        copied: float = 0.0,
    ) -> None:
        lengths = self._lengths = _Lengths()
        memory = ContiguousMemory(regions, reserve, cast(Any, lengths))

        def fits(seq_id: int) -> bool:
            return sum(lengths[seq_id]) <= longest and memory.fits(seq_id)

        super().__init__(name, memory, shares=False, steady=not copied, fits=fits)
        self._copied = copied

    def _told(self, request: Request, ask: Ask) -> None:
        for seq in request.sequences:
            self._lengths.known[seq.seq_id] = ask.prompt, ask.output

    def ended(self, requests: list[Request], now: float) -> list[Job]:
        for request in requests:
            for seq in request.sequences:
                del self._lengths.known[seq.seq_id]
        return super().ended(requests, now)

    def extra_seconds(self, step: ScheduledStep, machine: Any) -> float:
        """Return the time of copying the tokens of beams that go on from another beam's."""
        if not self._copied:
            return 0.0
        moved = sum(machine.kv_bytes(chunk.start) for chunk in step.chunks if chunk.length == 1)
        return float(machine.copied_seconds(self._copied * moved))


class RequestLevel(Contiguous):
    """Serves a batch until its last request has ended, and only then begins another (FasterTransformer).

    Every sequence gets a region of the longest length, the batch is as large as the memory allows, and answers are
    given when the batch ends.
    """

    def __init__(self, name: str, regions: Regions, longest: int, most: int, *, copied: float = 0.0) -> None:
        super().__init__(name, regions, lambda prompt, output: longest, longest, copied=copied)
        self._queue: deque[Job] = deque()
        self._num_queued = 0
        self._most = most
        self._done: list[Job] = []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._queue)

    @property
    def num_waiting(self) -> int:
        """Return how many sequences wait for a batch, each output a sequence of its own as with the other policies
        that do not share."""
        return self._num_queued + super().num_waiting

    @property
    def closed(self) -> bool:
        return self.scheduler.has_work

    def arrive(self, job: Job) -> None:
        if job.ask.n > self._most:
            self.refused += 1
        else:
            self._queue.append(job)
            self._num_queued += job.ask.n

    def schedule(self) -> ScheduledStep:
        if not self.scheduler.has_work:
            seats = self._most
            while self._queue and (seats := seats - self._queue[0].ask.n) >= 0:
                job = self._queue.popleft()
                self._num_queued -= job.ask.n
                self._add(job)
        return self.scheduler.schedule()

    def ended(self, requests: list[Request], now: float) -> list[Job]:
        self._done += super().ended(requests, now)
        if self.scheduler.has_work:
            return []
        jobs, self._done = self._done, []
        for job in jobs:
            job.finished = now
        return jobs


PAGED, MAX, POW2, ORACLE, FASTER = "jpaged", "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "FasterTransformer"
SYSTEMS = (PAGED, ORACLE, POW2, MAX, FASTER)
"""The policies of the PagedAttention paper's figures, jpaged's in the place of its vLLM."""


def build(name: str, served: Served, *, block_size: int = 16, copied: float = 0.0, **options: Any) -> Policy:
    """Build one of `SYSTEMS`; `options` go to the memory manager of the paged one, `preemption_mode` to its scheduler.

    Raises:
        ValueError: unknown name.
    """
    slots = served.pool_bytes // served.token_bytes
    longest = served.shape.max_len
    if name == PAGED:
        mode = options.pop("preemption_mode", "recompute")
        groups = served.shape.groups(block_size)
        memory = MemoryManager(PoolLayout.plan(groups, served.pool_bytes), max_step_tokens=BUDGET, **options)
        return Policy(name, memory, steady=not memory.prefix_caching, preemption_mode=mode)
    if name == FASTER:
        return RequestLevel(name, Regions(slots, longest), longest, slots // longest, copied=copied)
    return Contiguous(name, Buddy(slots), reservation(name, longest), longest, copied=copied)


def reservation(name: str, longest: int) -> Reservation:
    """Return what one of the three Orcas reserves for a request.

    Args:
        longest: most tokens of a sequence.

    Raises:
        ValueError: unknown name.
    """
    known: dict[str, Reservation] = {
        MAX: lambda prompt, output: longest,
        POW2: lambda prompt, output: min(longest, powers_of_two(prompt, output)),
        ORACLE: oracle,
    }
    if name not in known:
        raise ValueError(f"name={name!r} is not one of {', '.join(SYSTEMS)}")
    return known[name]
