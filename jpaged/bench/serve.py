"""Runs `jpaged bench serve`: the same requests at one rate after another, each bounded in number and time.

Requests are sent at times drawn beforehand, however slow the server is (an open loop), so that latencies show when the
server cannot keep up.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import httpx

from jpaged.bench.client import Answer, Target, ask_one, first_model
from jpaged.bench.load import Ask, arrival_times
from jpaged.bench.report import Limits, RateReport, summarise

Tell = Callable[[float, int, int], None]
"""Receives the progress: rate, requests that ended, errors among them."""


@dataclass(frozen=True)
class Plan:
    """The rates and bounds of a run's requests.

    Attributes:
        rates: requests a second, with one run for each rate.
        burstiness: see `arrival_times`; 1 = Poisson arrivals.
        max_seconds: a run ends after this time: nothing more is sent, and open requests are cut off.
        max_concurrency: most requests that are open at once; the others wait, which their latencies show. 0 = no bound.
        warmup: number of requests sent one after another before the first run, and not counted.
        seed: seed of the arrival times; the same for each rate.
    """

    rates: tuple[float, ...]
    burstiness: float = 1.0
    max_seconds: float = 300.0
    max_concurrency: int = 0
    warmup: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rates:
            raise ValueError("rates must name at least 1 rate")
        if not 0 < self.max_seconds < math.inf:
            raise ValueError(f"max_seconds={self.max_seconds} must be above 0 and finite")
        for name in ("max_concurrency", "warmup"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        for rate in self.rates:
            arrival_times(rate, 0, self.seed, self.burstiness)


def run(target: Target, asks: Sequence[Ask], plan: Plan, limits: Limits, tell: Tell) -> list[RateReport]:
    """Send all requests once at each rate and return the reports in the order of the rates.

    Raises:
        ValueError: a prompt does not suit the endpoint, the server names no model where none is given, or it cannot
            answer a first request.
    """
    for ask in asks:
        target.body(ask)
    return asyncio.run(_run(target, asks, plan, limits, tell))


async def _run(target: Target, asks: Sequence[Ask], plan: Plan, limits: Limits, tell: Tell) -> list[RateReport]:
    timeout = httpx.Timeout(plan.max_seconds, connect=min(30.0, plan.max_seconds))
    bounds = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=target.headers, timeout=timeout, limits=bounds, trust_env=False) as client:
        if not target.model:
            target = replace(target, model=await first_model(client, target))
        for ask in asks[: plan.warmup]:
            answer = await ask_one(client, target, ask, time.perf_counter())
            if answer.error is not None:
                raise ValueError(f"--url {target.url!r} did not answer the first request: {answer.error}")
        reports = []
        for rate in plan.rates:
            start = time.perf_counter()
            answers = await _run_rate(client, target, asks, plan, rate, partial(tell, rate))
            reports.append(summarise(rate, len(asks), answers, start, limits))
        return reports


async def _run_rate(
    client: httpx.AsyncClient,
    target: Target,
    asks: Sequence[Ask],
    plan: Plan,
    rate: float,
    tell: Callable[[int, int], None],
) -> list[Answer]:
    """Send the requests at one rate and return their answers; all have ended."""
    times = arrival_times(rate, len(asks), plan.seed, plan.burstiness)
    gate = asyncio.Semaphore(plan.max_concurrency or len(asks))
    start = time.perf_counter()
    answers: list[Answer] = []

    async def send(ask: Ask, due: float) -> None:
        try:
            async with gate:
                answer = await ask_one(client, target, ask, due)
        except asyncio.CancelledError:  # while it waited for a free place
            answer = Answer(due, ended=time.perf_counter(), error="cut off: the time was up")
        answers.append(answer)
        tell(len(answers), sum(a.error is not None for a in answers))

    tasks: set[asyncio.Task[None]] = set()
    for ask, after in zip(asks, times, strict=True):
        if after >= plan.max_seconds:
            break
        await asyncio.sleep(max(0.0, start + after - time.perf_counter()))
        tasks.add(asyncio.create_task(send(ask, start + after)))
    await _until(tasks, start + plan.max_seconds)
    return answers


async def _until(tasks: Iterable[asyncio.Task[None]], deadline: float) -> None:
    """Wait for tasks until the deadline, and cancel those that are left."""
    done, late = await asyncio.wait(tasks, timeout=max(0.0, deadline - time.perf_counter()))
    for task in late:
        task.cancel()
    await asyncio.gather(*done, *late)
