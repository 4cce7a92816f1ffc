"""What an engine has done and is doing: counters while it runs, and the snapshot of them that users get."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jpaged.memory import BlockCounts, DiskStats
from jpaged.scheduling import ScheduledStep

STEP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the buckets of step times, in seconds; one bucket more holds the longer ones."""


@dataclass(frozen=True)
class StepTimes:
    """How long each turn of the engine's loop took on the host, waiting for the device included.

    A turn that only reads the last step back, as nothing was left to run, counts too.

    Attributes:
        count: number of turns.
        total: seconds that all of them took.
        last: seconds that the last one took.
        buckets: steps of at most each of `STEP_BOUNDS` seconds that are longer than the bound before; then the rest.
    """

    count: int
    total: float
    last: float
    buckets: tuple[int, ...]


@dataclass(frozen=True)
class EngineStats:
    """Gauges (what is now) and counters (since the engine was made) of an engine, over all its replicas.

    Attributes:
        num_running, num_waiting, num_swapped: requests in the batch, in the queue and in host memory.
        num_steps: steps dispatched that compute tokens.
        num_computed_tokens: tokens that went through the model, those computed again after a preemption included.
        num_prompt_tokens: prompt tokens of the requests that have got their first token.
        num_output_tokens: tokens that requests have got.
        prefix_queries: prompt tokens that were looked up in the prefix cache: those of `num_prompt_tokens`.
        prefix_hits: prompt tokens that the prefix cache had, so that they were not computed.
        num_recomputes, num_swaps: preemptions, by the way the request comes back.
        finished: outputs that ended, by finish_reason.
        blocks: blocks of each layer group by state.
        num_pages: large pages of the pool.
        num_available_pages: large pages that hold nothing in use; the prefix cache may be in them.
        num_drafts: how often drafts of a sequence were verified.
        num_draft_tokens, num_accepted_tokens: drafts that were verified, and those that were kept.
        num_adapter_loads: low-rank adapters that were written to the pool, again after an eviction included.
        num_encoded_images: images that went through the model's encoder, those encoded again included.
        step_times: times of the steps so far.
        num_compiled: shapes compiled.
        compile_seconds: time that tracing and compiling them took.
        num_recompiles: shapes compiled after a warm-up.
        num_compiled_in_background: shapes that were compiled in the background while the engine served.
        num_shapes_to_come: shapes that are still to be compiled there.
        disk: what the disk tier has and did; None = there is none.
    """

    num_running: int
    num_waiting: int
    num_swapped: int
    num_steps: int
    num_computed_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_queries: int
    prefix_hits: int
    num_recomputes: int
    num_swaps: int
    finished: Mapping[str, int]
    blocks: tuple[BlockCounts, ...]
    num_pages: int
    num_available_pages: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_adapter_loads: int
    num_encoded_images: int
    step_times: StepTimes
    num_compiled: int
    compile_seconds: float
    num_recompiles: int
    num_compiled_in_background: int
    num_shapes_to_come: int
    disk: DiskStats | None = None

    @property
    def num_preemptions(self) -> int:
        """Return how often a request's memory was taken back, by either way."""
        return self.num_recomputes + self.num_swaps

    @property
    def kv_cache_usage(self) -> float:
        """Return the share of the pool that is in use, in [0, 1]."""
        return 1 - self.num_available_pages / self.num_pages

    @property
    def acceptance_rate(self) -> float:
        """Return the share of the verified drafts that were kept, in [0, 1]."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Return the share of the prompt tokens looked up that came from the prefix cache, in [0, 1]."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


@dataclass
class Counters:
    """What the engine's loop counts; the attributes are those of `EngineStats`.

    Attributes:
        num_steps, num_tokens: steps that were dispatched to compute tokens, and these tokens.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_adapter_loads: int = 0
    num_encoded_images: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    step_seconds: float = 0.0
    last_step_seconds: float = 0.0
    step_buckets: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS) + 1))

    def dispatched(self, steps: Sequence[ScheduledStep]) -> None:
        """Count the steps of all replicas that are dispatched together."""
        self.num_steps += any(step.chunks for step in steps)
        self.num_tokens += sum(step.num_tokens for step in steps)
        self.num_adapter_loads += sum(len(step.loads) for step in steps)
        self.num_encoded_images += sum(len(step.encodes) for step in steps)

    def read(self, step: ScheduledStep) -> None:
        """Count what a step that was read back brings, before the scheduler takes it in."""
        started = {}
        for request, seq, chunk in step.samples:
            if seq.finish_reason is None and not chunk.drafts:
                self.num_output_tokens += 1
                if request.first_token_time is None:
                    started[request.request_id] = request
        for request in started.values():
            self.num_prompt_tokens += len(request.prompt_token_ids)
            self.prefix_queries += len(request.prompt_token_ids)
            self.prefix_hits += request.num_cached_tokens

    def took(self, seconds: float) -> None:
        """Count the time of a step."""
        self.step_seconds += seconds
        self.last_step_seconds = seconds
        self.step_buckets[bisect_left(STEP_BOUNDS, seconds)] += 1

    @property
    def step_times(self) -> StepTimes:
        """Return the times of all steps so far."""
        buckets = tuple(self.step_buckets)
        return StepTimes(sum(buckets), self.step_seconds, self.last_step_seconds, buckets)
