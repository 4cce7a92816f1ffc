"""Finds latency against request rate, and the highest rate that a policy sustains at a given latency."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from jpaged.benchmarks.serving_sim.beams import GAP, MadeUpRankings, copied_share
from jpaged.benchmarks.serving_sim.machine import Engine
from jpaged.benchmarks.serving_sim.models import Served
from jpaged.benchmarks.serving_sim.policies import build
from jpaged.benchmarks.serving_sim.simulation import Outcome, simulate
from jpaged.benchmarks.serving_sim.workload import Workload

LIMIT = 0.2
"""Seconds a token at which rates are compared."""
FAR = 1.0
"""Seconds a token beyond which no rate is tried: the end of the axis in the paper's figures."""
STEP = 1.25
"""Ratio of one rate to the one before."""
LEAST_REQUESTS = 200


@dataclass(frozen=True)
class Setting:
    """Describes what is served how, as one panel of a figure.

    Attributes:
        n: outputs or beams of each request.
        seconds: of arrivals at each rate.
        first_rate: the lowest rate that is tried, requests/s.
    """

    served: Served
    workload: Workload
    engine: Engine
    seconds: float
    seed: int
    first_rate: float
    n: int = 1
    beams: bool = False

    @property
    def name(self) -> str:
        several = f", {'beam' if self.beams else 'n ='} {self.n}" if self.n > 1 else ""
        return f"{self.served.name}, {self.workload.name}{several}"


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


def run_at(setting: Setting, system: str, rate: float) -> Outcome:
    """Serve a setting's requests at one rate."""
    number = max(LEAST_REQUESTS, int(rate * setting.seconds))
    asks = setting.workload.arrivals(rate, number, setting.seed, n=setting.n, beams=setting.beams)
    copied = copied_share(setting.n) if setting.beams else 0.0
    policy = build(system, setting.served, copied=copied)
    rankings = MadeUpRankings(setting.seed, GAP) if setting.beams else None
    waiting = int(2 * FAR * setting.workload.mean_output * rate * setting.n) + 64
    return simulate(
        policy, setting.served.machine(setting.engine), asks, rankings=rankings, most_waiting=waiting
    )


def curve(setting: Setting, system: str, say: Callable[[str], None]) -> Curve:
    """Try one rate after another until the latency is far too high."""
    points: list[tuple[float, float]] = []
    rate = setting.first_rate
    while True:
        outcome = run_at(setting, system, rate)
        points.append((rate, outcome.latency))
        if outcome.latency > FAR:
            break
        rate *= STEP
    made = Curve(system, tuple(points))
    say(f"{setting.name}, {system}: {made.sustained():.2f} requests/s")
    return made
