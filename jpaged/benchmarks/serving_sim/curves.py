"""Finds latency against request rate, and the highest rate that a policy sustains at a given latency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jpaged.benchmarks.memory_shapes import BLOCK_SIZE
from jpaged.benchmarks.serving_sim.beams import MadeUpRankings, copied_share
from jpaged.benchmarks.serving_sim.machine import BytesPerToken, Engine
from jpaged.benchmarks.serving_sim.models import Served
from jpaged.benchmarks.serving_sim.policies import PAGED, build
from jpaged.benchmarks.serving_sim.simulation import Outcome, simulate
from jpaged.benchmarks.serving_sim.workload import Workload, shared

LIMIT = 0.2
"""Seconds a token at which rates are compared."""
FAR = 1.0
"""Seconds a token beyond which no rate is tried: the end of the axis in the paper's figures."""
HALVINGS = 3
"""How often the interval of rates is halved in which the limit lies."""
LOWEST, HIGHEST = 256, 64
"""The first rate is this many times the lowest that is tried, and the highest this many times the first."""
LEAST = 200
"""Requests that a run at the rate that a policy sustains has at the least: all runs of its row last as long."""
ROUND = 100
"""Seconds to whose multiples longer runs are rounded up."""
WARM_UP = 0.2
"""Share of a run's time in which its queue and its batch build up; who comes then is served and not counted."""


@dataclass(frozen=True)
class Setting:
    """Describes what is served how, as one panel of a figure.

    Attributes:
        n: outputs or beams of each request.
        seconds: of arrivals at each rate, so that a run has more requests the higher its rate is; `compare` makes
            runs longer.
        first_rate: the rate that is tried first, requests/s.
        prefix: tokens that stand before every prompt, the same ones; what pages finds them in its cache.
        charges_kv: whether a step lasts longer for the KV that it reads, as on every real device.
        reads_once: whether a step reads the KV of a prefix that sequences share once, see `Machine.read_once`.
        prompts_apart: see `Machine`.
    """

    served: Served
    workload: Workload
    engine: Engine
    seconds: float
    seed: int
    first_rate: float
    n: int = 1
    beams: bool = False
    prefix: int = 0
    charges_kv: bool = True
    reads_once: bool = False
    prompts_apart: bool = False

    @property
    def name(self) -> str:
        several = f", {'beam' if self.beams else 'n ='} {self.n}" if self.n > 1 else ""
        return f"{self.served.name}, {self.workload.name}{several}"

    def number(self, rate: float) -> int:
        """Return how many requests a run at one rate has."""
        return number_of(rate, self.seconds)


@dataclass(frozen=True)
class Curve:
    """Holds a policy's latencies, seconds a token, by rate in requests/s, ascending."""

    system: str
    points: tuple[tuple[float, float], ...]

    def sustained(self, limit: float = LIMIT) -> float:
        """Return the highest rate at which the latency is `limit` at most, between two that were tried by a straight
        line through the logarithms; 0 where the first one is above it already."""
        before: tuple[float, float] | None = None
        for rate, latency in self.points:
            if latency > limit:
                if before is None:
                    return 0.0
                top = min(latency, 10 * FAR)
                part = math.log(limit / before[1]) / math.log(top / before[1])
                return before[0] * (rate / before[0]) ** part
            before = rate, latency
        return self.points[-1][0] if self.points else 0.0

    def is_least(self, limit: float = LIMIT) -> bool:
        """Tell whether no rate was too high, so that at least the last one is sustained."""
        return all(latency <= limit for _, latency in self.points)


def number_of(rate: float, seconds: float) -> int:
    """Return how many requests come in some seconds at a rate: two at least."""
    return max(2, int(rate * seconds))


def seconds_for(rate: float, seconds: float) -> float:
    """Return for how long requests come where a run at a rate is to have `LEAST` of them: `seconds` at the least."""
    needed = LEAST / rate
    return seconds if needed <= seconds else float(ROUND * math.ceil(needed / ROUND))


def run_at(setting: Setting, system: str, rate: float, *, give_up: bool = True) -> Outcome:
    """Serve a setting's requests at one rate.

    Args:
        give_up: whether a run ends where so many wait that the latency must be `FAR`.
    """
    asks = setting.workload.arrivals(rate, setting.number(rate), setting.seed, n=setting.n, beams=setting.beams)
    if setting.prefix:
        asks = shared(asks, range(setting.prefix))
    options = {"prefix_caching": True} if setting.prefix and system == PAGED else {}
    copied = copied_share(setting.n) if setting.beams else 0.0
    policy = build(system, setting.served, copied=copied, **options)
    rankings = MadeUpRankings(setting.seed) if setting.beams else None
    most = FAR * setting.workload.mean_output * (1 if policy.shares else setting.n)
    waiting = None if not give_up else 32 + int(most * rate)
    machine = setting.served.machine(setting.engine)
    if not setting.charges_kv:
        machine = replace(machine, kv_bytes=BytesPerToken(0.0))
    if setting.reads_once and system == PAGED:  # the others keep it once for each request
        machine = replace(machine, read_once=setting.prefix // BLOCK_SIZE * BLOCK_SIZE)
    machine = replace(machine, prompts_apart=setting.prompts_apart)
    return simulate(policy, machine, asks, rankings=rankings, most_waiting=waiting, warm_up=WARM_UP)


def curve(setting: Setting, system: str) -> Curve:
    """Try rates: twice or half as many until the limit lies between two of them, then between these.

    Where every rate up to the highest is fast, the curve ends there.
    """
    points: dict[float, float] = {}

    def is_fast(rate: float) -> bool:
        points[rate] = run_at(setting, system, rate).latency
        return points[rate] <= LIMIT

    low = high = setting.first_rate
    if is_fast(low):
        while high < HIGHEST * setting.first_rate and is_fast(high := 2 * high):
            low = high
        if low == high:
            return Curve(system, tuple(sorted(points.items())))
    else:
        while low > setting.first_rate / LOWEST and not is_fast(low := low / 2):
            high = low
        if low == high:
            return Curve(system, tuple(sorted(points.items())))
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_fast(middle) else (low, middle)
    return Curve(system, tuple(sorted(points.items())))


def compare(setting: Setting, systems: Sequence[str]) -> tuple[Setting, dict[str, Curve]]:
    """Return each system's curve, and the setting with the seconds for which requests came.

    They come for as long in every run of every system, and longer than the setting says where one sustains a rate at
    which less than `LEAST` requests would come: a mean over few of them moves with single ones, and in a longer run a
    system that cannot keep up falls further behind, so that runs that are compared are equally long.
    """
    while True:
        found: dict[str, Curve] = {}
        for system in reversed(systems):  # those that sustain least are the last ones, and say how long runs are
            found[system] = curve(setting, system)
            rate = found[system].sustained()
            needed = seconds_for(rate, setting.seconds) if rate else setting.seconds
            if needed > setting.seconds:  # a rate that rests on few requests may be far too low
                setting = replace(setting, seconds=min(needed, 2 * setting.seconds))
                break
        else:
            return setting, {system: found[system] for system in systems}
