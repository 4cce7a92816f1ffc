"""One replica of a data-parallel engine: its own scheduler, memory and step in flight. Most engines have one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from functools import reduce
from operator import add

from jpaged.engine.stats import Counters, EngineStats
from jpaged.execution import InFlight, StepResults
from jpaged.execution.compile.program import Compilations
from jpaged.memory import MISS_REASONS, MemoryManager, MemoryMap, MemoryReport, PinnedSequences
from jpaged.scheduling import Request, ScheduledStep, Scheduler


class Replica:
    """The part of an engine's state that belongs to one of its pools.

    Args:
        max_model_len: most tokens of a sequence.

    Attributes:
        in_flight: its parts of the steps that were dispatched and not read back, oldest first. There is one between two
            steps, and two while the engine waits for the older one or after that wait was interrupted.
        load: number of its sequences that have not finished.
        ended: number of outputs that ended, by their finish_reason.
        pins: prefixes that stay in its pool.
        peak_blocks: blocks in use, over all groups, when `peak_report` was made.
        peak_report: report of the busiest step so far, to within 5 % (a report walks all tables).
    """

    def __init__(self, scheduler: Scheduler, max_model_len: int) -> None:
        self.scheduler = scheduler
        self.in_flight: deque[InFlight] = deque()
        self.max_model_len = max_model_len
        self.load = 0
        self.ended: Counter[str] = Counter()
        self.pins = PinnedSequences(scheduler.memory, max_model_len)
        self.peak_blocks = 0
        self.peak_report: MemoryReport | None = None

    @property
    def memory(self) -> MemoryManager:
        return self.scheduler.memory

    @property
    def has_work(self) -> bool:
        """Tell whether a request is unfinished; without one, steps in flight need not be read back."""
        return self.scheduler.has_work

    def add(self, request: Request, *, first: bool = False) -> None:
        """Queue a request.

        Args:
            first: whether it is served before all others, see `Scheduler.add`.

        Raises:
            ValueError: it could never fit the pool.
        """
        self.scheduler.add(request, first=first)
        self.load += len(request.sequences)

    def let_go(self, request: Request) -> None:
        """Count a request that finished or was aborted."""
        self.load -= len(request.sequences)
        self.ended.update(seq.finish_reason for seq in request.sequences if seq.finish_reason is not None)

    def take_in(self, step: ScheduledStep, results: StepResults, stats: Counters) -> list[Request]:
        """Process a step's results, count them in `stats`, and return the requests that finished."""
        for (request, position), logprob, ranking in results.scores:
            request.prompt_logprobs[position] = logprob, ranking
        for request, start, end, vector in results.pooled:
            request.pooled[start] = end, vector
        stats.read(step)
        speculation = self.scheduler.speculation
        accepted = 0 if speculation is None else speculation.num_accepted
        forced = self.scheduler.constrained.num_forced
        finished = self.scheduler.update(step, *results.sampled)
        stats.num_output_tokens += self.scheduler.constrained.num_forced - forced
        if speculation is not None:
            stats.num_output_tokens += speculation.num_accepted - accepted
        return finished

    def restart(self) -> None:
        """Queue all requests to be computed again; see `Scheduler.restart`."""
        self.in_flight.clear()
        self.scheduler.restart()
        self.pins.lose()

    def memory_report(self) -> MemoryReport:
        """Report what holds the pool's blocks, counting every token that a dispatched step computes."""
        return self.memory.report(self._lengths)

    def memory_map(self) -> MemoryMap:
        """Map every block of the pool, including the last tokens of running sequences."""
        return self.memory.map(self._lengths)

    @property
    def _lengths(self) -> dict[int, int]:
        """Return how many tokens of each running sequence have KV; the memory manager learns it only at block ends."""
        sequences = (seq for request in self.scheduler.running for seq in request.sequences)
        return {seq.seq_id: seq.num_computed for seq in sequences if seq.row >= 0 and seq.parent is None}

    def watch_memory(self, step: ScheduledStep) -> None:
        """Keep a report of the memory in use if the dispatched step is the busiest so far."""
        used = self.memory.num_used_blocks
        if step.num_chunks and used > 1.05 * self.peak_blocks:
            self.peak_blocks = used
            self.peak_report = self.memory_report()

    def reset_peak(self) -> None:
        """Forget the busiest step."""
        self.peak_blocks, self.peak_report = 0, None


def chosen_replica(replicas: Sequence[Replica], number: int) -> Replica:
    """Return one replica.

    Raises:
        ValueError: there is no replica of this number.
    """
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(replicas):
        raise ValueError(f"replica={number!r} is not one of the {len(replicas)} replicas")
    return replicas[number]


def take_snapshot(replicas: Sequence[Replica], compilations: Compilations, counters: Counters) -> EngineStats:
    """Add up the counters and gauges of all replicas. It only reads, in time linear in replicas and layer groups."""
    schedulers = [replica.scheduler for replica in replicas]
    each = zip(*(replica.memory.block_counts for replica in replicas), strict=True)
    finished: Counter[str] = Counter()
    for replica in replicas:
        finished.update(replica.ended)
    tiers = replicas[0].memory.tiers  # several replicas have none
    of_tiers = {} if tiers is None else tiers.stats()
    speculations = [scheduler.speculation for scheduler in schedulers if scheduler.speculation is not None]
    return EngineStats(
        num_running=sum(len(scheduler.running) for scheduler in schedulers),
        num_waiting=sum(len(scheduler.waiting) for scheduler in schedulers),
        num_swapped=sum(len(scheduler.swapped) for scheduler in schedulers),
        num_steps=counters.num_steps,
        num_computed_tokens=counters.num_tokens,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_output_tokens=counters.num_output_tokens,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
        num_recomputes=sum(scheduler.preemption.num_recomputes for scheduler in schedulers),
        num_swaps=sum(scheduler.preemption.num_swaps for scheduler in schedulers),
        finished=dict(finished),
        blocks=tuple(reduce(add, counts) for counts in each),
        num_pages=sum(replica.memory.layout.num_pages for replica in replicas),
        num_available_pages=sum(replica.memory.num_available_pages for replica in replicas),
        num_drafts=sum(speculation.num_drafts for speculation in speculations),
        num_draft_tokens=sum(speculation.num_drafted for speculation in speculations),
        num_accepted_tokens=sum(speculation.num_accepted for speculation in speculations),
        num_adapter_loads=counters.num_adapter_loads,
        num_encoded_images=counters.num_encoded_images,
        step_times=counters.step_times,
        num_compiled=compilations.count,
        compile_seconds=compilations.seconds,
        num_recompiles=compilations.num_recompiles,
        num_compiled_in_background=compilations.num_in_background,
        num_shapes_to_come=compilations.num_to_come,
        ram=of_tiers.get("ram"),
        disk=of_tiers.get("disk"),
        prefix_misses={
            reason: sum(replica.memory.misses.tokens[reason] for replica in replicas) for reason in MISS_REASONS
        },
    )
