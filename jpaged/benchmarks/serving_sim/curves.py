"""Finds latency against request rate, and the highest rate that a policy sustains at a given latency."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
WARM_UP = 0.2
"""Share of a run's time in which its queue and its batch build up; who comes then is served and not counted."""


@dataclass(frozen=True)
class Setting:
    """Describes what is served how, as one panel of a figure.

    Attributes:
        n: outputs or beams of each request.
        seconds: of arrivals at each rate, so that a run has more requests the higher its rate is.
        first_rate: the rate that is tried first, requests/s.
        prefix: tokens that stand before every prompt, the same ones; what pages finds them in its cache.
        charges_kv: whether a step lasts longer for the KV that it reads, as on every real device.
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
