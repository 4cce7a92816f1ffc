"""Counters of a running engine, the snapshot that users get, its log lines and its named metrics."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from operator import attrgetter
from typing import Protocol, TypeVar

from jpaged.memory import BlockCounts, TierStats
from jpaged.metrics import Counter, Gauge, Histogram, Metric
from jpaged.scheduling import ScheduledStep
from jpaged.scheduling.work import ENCODES, LOADS

logger = logging.getLogger("jpaged.engine")

R = TypeVar("R")
Clock = Callable[[], float]

INTERVAL = 10.0
"""Least seconds between two lines of the log."""

PREFIX = "jpaged:"
"""Prefix of every metric's name."""

STEP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the buckets of step times, in seconds; one bucket more holds the longer ones."""


@dataclass(frozen=True)
class StepTimes:
    """Durations of the turns of the engine's loop on the host, including waits for the device.

    A turn that only reads back the last step, because no requests were left to run, counts too.

    Attributes:
        count: number of turns.
        total: seconds of all turns.
        last: seconds of the last turn.
        buckets: number of turns in each bucket. A bucket counts the turns up to its bound in `STEP_BOUNDS` and above
            the bound before it; the last bucket counts those longer than all bounds.
    """

    count: int
    total: float
    last: float
    buckets: tuple[int, ...]


@dataclass(frozen=True)
class EngineStats:
    """Gauges (current values) and counters (since the engine was made), over all replicas.

    Attributes:
        num_running, num_waiting, num_swapped: requests in the batch, in the queue and in host memory.
        num_steps: steps dispatched that compute tokens.
        num_computed_tokens: tokens that went through the model, including those computed again after a preemption.
        num_prompt_tokens: prompt tokens of the requests that have their first token.
        num_output_tokens: tokens generated for requests.
        prefix_queries: prompt tokens that were looked up in the prefix cache, the same as `num_prompt_tokens`.
        prefix_hits: prompt tokens that were in the prefix cache and so were not computed.
        num_recomputes, num_swaps: preemptions whose request is computed again, and those whose blocks are swapped.
        finished: outputs that ended, by finish_reason.
        blocks: blocks of each layer group by state.
        num_pages: large pages of the pool.
        num_available_pages: large pages without blocks in use; they may hold cached prefixes.
        num_drafts: number of times that a sequence's drafts were verified.
        num_draft_tokens, num_accepted_tokens: drafts that were verified, and drafts that were kept.
        num_adapter_loads: writes of low-rank adapters to the pool, including those after an eviction.
        num_encoded_images: images that went through the model's encoder, including those encoded again.
        step_times: durations of the steps so far.
        num_compiled: shapes compiled.
        compile_seconds: time that tracing and compiling them took.
        num_recompiles: shapes compiled after a warm-up.
        num_compiled_in_background: shapes that were compiled in the background while the engine served.
        num_shapes_to_come: shapes that are still to be compiled in the background.
        ram, disk: gauges and counters of each tier below the pool; None = there is no such tier.
        prefix_misses: prompt tokens that were not in the prefix cache when their request was first admitted, by reason,
            see `jpaged.memory.MissReasons`.
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
    disk: TierStats | None = None
    ram: TierStats | None = None
    prefix_misses: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_preemptions(self) -> int:
        """Return the number of preemptions of both kinds."""
        return self.num_recomputes + self.num_swaps

    @property
    def kv_cache_usage(self) -> float:
        """Return the share of the pool that is in use, in [0, 1]; 0 for a model that keeps nothing, as an encoder."""
        return 1 - self.num_available_pages / self.num_pages if self.num_pages else 0.0

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
    """Counters that the engine's loop updates; the attributes are those of `EngineStats`.

    Attributes:
        num_steps, num_tokens: steps that were dispatched to compute tokens, and the number of these tokens.
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
        self.num_steps += any(step.num_chunks for step in steps)
        self.num_tokens += sum(step.num_tokens for step in steps)
        self.num_adapter_loads += sum(len(step.work_of(LOADS)) for step in steps)
        self.num_encoded_images += sum(encode.completes for step in steps for encode in step.work_of(ENCODES))

    def read(self, step: ScheduledStep) -> None:
        """Count the results of a step that was read back, before the scheduler processes them."""
        seqs, requests = step.decodes.seqs, step.decodes.requests  # in columns: a step has hundreds
        self.num_output_tokens += [*map(attrgetter("finish_reason"), seqs)].count(None)
        started = {}
        if None in map(attrgetter("first_token_time"), requests):
            started = {each.request_id: each for each in requests if each.first_token_time is None and each.live}
        for sample in step.other_samples:
            request, seq, chunk = sample
            if seq.finish_reason is None and not chunk.drafts and not (step.is_constrained and sample.is_overtaken):
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


class StatsLog:
    """Logs at most every `INTERVAL` seconds a line about the steps since the last one.

    Args:
        clock: a monotonic clock, in seconds.

    Attributes:
        enabled: whether lines are written at all.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.enabled = True
        self._clock = clock
        self._last: tuple[float, EngineStats] | None = None
        self._stepped = clock()

    def step_ended(self, snapshot: Callable[[], EngineStats]) -> None:
        """Write a line if it is due and the log is enabled."""
        now = self._clock()
        idle, self._stepped = now - self._stepped > INTERVAL, now
        if not self.enabled or (self._last is not None and not idle and now - self._last[0] < INTERVAL):
            return
        if not logger.isEnabledFor(logging.INFO):
            return
        stats = snapshot()
        if self._last is not None and not idle:  # idle time would say nothing about the speed
            logger.info("%s", describe(self._last[1], stats, now - self._last[0]))
        self._last = now, stats


def describe(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """Return one line about the last `seconds` and the current state."""
    prompt = now.num_prompt_tokens - before.num_prompt_tokens
    output = now.num_output_tokens - before.num_output_tokens
    queries, hits = now.prefix_queries - before.prefix_queries, now.prefix_hits - before.prefix_hits
    preempted = now.num_preemptions - before.num_preemptions
    tiers = ""
    for name in ("ram", "disk"):
        tier, earlier = getattr(now, name), getattr(before, name)
        if tier is not None and earlier is not None:
            pays = "nowhere yet" if tier.break_even is None else f"from {tier.break_even} tokens on"
            tiers += f"; {tier.hits - earlier.hits} prompt tokens from {name}, which pays {pays}"
    return (
        f"{prompt / seconds:.1f} prompt tokens/s, {output / seconds:.1f} output tokens/s; {now.num_running} running, "
        f"{now.num_waiting} waiting, {now.num_swapped} swapped; {now.kv_cache_usage:.1%} of the KV pool in use, "
        f"{hits / queries if queries else 0:.1%} of prompt tokens from the prefix cache; {preempted} preempted, "
        f"{now.num_compiled - before.num_compiled} shapes compiled{tiers}"
    )


class Watched(Protocol):
    """The parts of an engine that `watched` uses."""

    stats: Counters
    stats_log: StatsLog

    def snapshot(self) -> EngineStats: ...


E = TypeVar("E", bound=Watched)


def watched(step: Callable[[E], R]) -> Callable[[E], R]:
    """Decorate an engine's step: time each call, then let the log write its line."""

    @wraps(step)
    def timed(self: E) -> R:
        start = time.perf_counter()
        result = step(self)
        self.stats.took(time.perf_counter() - start)
        self.stats_log.step_ended(self.snapshot)
        return result

    return timed


def metrics_of(stats: EngineStats) -> list[Metric]:
    """Return every number of a snapshot as a named metric."""
    gauges = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "num_requests_swapped": stats.num_swapped,
        "kv_cache_usage_perc": stats.kv_cache_usage,
        "shapes_to_compile": stats.num_shapes_to_come,
    }
    counters = {
        "prompt_tokens": stats.num_prompt_tokens,
        "generation_tokens": stats.num_output_tokens,
        "computed_tokens": stats.num_computed_tokens,
        "prefix_cache_queries": stats.prefix_queries,
        "prefix_cache_hits": stats.prefix_hits,
        "spec_decode_num_drafts": stats.num_drafts,
        "spec_decode_num_draft_tokens": stats.num_draft_tokens,
        "spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
        "adapter_loads": stats.num_adapter_loads,
        "encoded_images": stats.num_encoded_images,
        "num_preemptions": stats.num_preemptions,
        "compiled_shapes": stats.num_compiled,
        "compile_seconds": stats.compile_seconds,
        "recompiled_shapes": stats.num_recompiles,
        "background_compiled_shapes": stats.num_compiled_in_background,
    }
    metrics: list[Metric] = [Gauge(PREFIX + name, value) for name, value in gauges.items()]
    for blocks in stats.blocks:
        for state in ("used", "evictable", "empty"):
            labels = {"group": blocks.name, "state": state}
            metrics.append(Gauge(f"{PREFIX}kv_blocks", getattr(blocks, state), labels=labels))
    metrics += [Counter(PREFIX + name, value) for name, value in counters.items()]
    for name, tier in (("ram", stats.ram), ("disk", stats.disk)):
        if tier is not None:
            metrics += _tier(name, tier)
    for way, count in (("recompute", stats.num_recomputes), ("swap", stats.num_swaps)):
        metrics.append(Counter(f"{PREFIX}preemptions_by_way", count, labels={"way": way}))
    for reason, count in stats.prefix_misses.items():
        metrics.append(Counter(f"{PREFIX}prefix_cache_missed_tokens", count, labels={"reason": reason}))
    for reason, count in stats.finished.items():
        metrics.append(Counter(f"{PREFIX}request_success", count, labels={"finished_reason": reason}))
    metrics.append(_steps(stats))
    return metrics


def _tier(name: str, tier: TierStats) -> list[Metric]:
    gauges = {
        "usage_perc": tier.used_bytes / tier.limit_bytes,
        "blocks": tier.num_blocks,
        "read_bytes_per_second": tier.read_rate,
        "open": int(tier.is_open),
    }
    if tier.break_even is not None:  # left out while nothing is read, or nothing is known yet
        gauges["break_even_tokens"] = tier.break_even
    counters = {
        "cache_hits": tier.hits,
        "read_bytes": tier.read_bytes,
        "written_bytes": tier.written_bytes,
        "failures": tier.failures,
        "skipped_blocks": tier.skipped,
    }
    metrics: list[Metric] = [Gauge(f"{PREFIX}{name}_{of}", value) for of, value in gauges.items()]
    return metrics + [Counter(f"{PREFIX}{name}_{of}", value) for of, value in counters.items()]


def _steps(stats: EngineStats) -> Histogram:
    times, total, buckets = stats.step_times, 0, {}
    for bound, count in zip([*map(str, STEP_BOUNDS), "+Inf"], times.buckets, strict=True):
        total += count
        buckets[bound] = total
    return Histogram(f"{PREFIX}step_time_seconds", times.count, times.total, buckets)
