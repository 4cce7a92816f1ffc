"""Lines about throughput in the log while an engine runs, at a bounded rate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import wraps
from typing import Protocol, TypeVar

from jpaged.engine.stats import Counters, EngineStats

logger = logging.getLogger("jpaged.engine")

INTERVAL = 10.0
"""Least seconds between two lines."""


R = TypeVar("R")
Clock = Callable[[], float]


class StatsLog:
    """Says at most every `INTERVAL` seconds what the steps since the last line did.

    Args:
        clock: returns seconds that only grow.

    Attributes:
        enabled: whether lines are written at all.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.enabled = True
        self._clock = clock
        self._last: tuple[float, EngineStats] | None = None
        self._stepped = clock()

    def step_ended(self, snapshot: Callable[[], EngineStats]) -> None:
        """Write a line if it is time, and somebody listens."""
        now = self._clock()
        idle, self._stepped = now - self._stepped > INTERVAL, now
        if not self.enabled or (self._last is not None and not idle and now - self._last[0] < INTERVAL):
            return
        if not logger.isEnabledFor(logging.INFO):
            return
        stats = snapshot()
        if self._last is not None and not idle:  # a time without requests would say nothing about the speed
            logger.info("%s", describe(self._last[1], stats, now - self._last[0]))
        self._last = now, stats


def describe(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """Return one line about what happened within `seconds`, and what is now."""
    prompt = now.num_prompt_tokens - before.num_prompt_tokens
    output = now.num_output_tokens - before.num_output_tokens
    queries, hits = now.prefix_queries - before.prefix_queries, now.prefix_hits - before.prefix_hits
    preempted = now.num_preemptions - before.num_preemptions
    disk = ""
    if now.disk is not None and before.disk is not None:
        least = now.disk.break_even
        disk = f"; {now.disk.hits - before.disk.hits} prompt tokens from disk, which pays " + (
            "nowhere yet" if least is None else f"from {least} tokens on"
        )
    return (
        f"{prompt / seconds:.1f} prompt tokens/s, {output / seconds:.1f} output tokens/s; {now.num_running} running, "
        f"{now.num_waiting} waiting, {now.num_swapped} swapped; {now.kv_cache_usage:.1%} of the KV pool in use, "
        f"{hits / queries if queries else 0:.1%} of prompt tokens from the prefix cache; {preempted} preempted, "
        f"{now.num_compiled - before.num_compiled} shapes compiled{disk}"
    )


class Watched(Protocol):
    """An engine, as `watched` needs it."""

    stats: Counters
    stats_log: StatsLog

    def snapshot(self) -> EngineStats: ...


E = TypeVar("E", bound=Watched)


def watched(step: Callable[[E], R]) -> Callable[[E], R]:
    """Time every call of an engine's step, and let its log speak."""

    @wraps(step)
    def timed(self: E) -> R:
        start = time.perf_counter()
        result = step(self)
        self.stats.took(time.perf_counter() - start)
        self.stats_log.step_ended(self.snapshot)
        return result

    return timed
