"""Runs what `jpaged bench serving` measures: latency against rate by policy, and what each mechanism is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jpaged.benchmarks.serving_load import arrival_times
from jpaged.benchmarks.serving_real.host import RANDOM, Host, Sizes
from jpaged.benchmarks.serving_real.measures import Row, latency, measured
from jpaged.benchmarks.serving_real.policies import (
    MAX_OF_TWICE,
    POLICIES,
    UNCACHED,
    RealPolicy,
    chunking,
    evicting,
    returning,
)
from jpaged.benchmarks.serving_real.workload import KINDS, SHARING, Task, Texts, arrange, within
from jpaged.benchmarks.serving_report import Limits
from jpaged.benchmarks.serving_sim.curves import Curve
from jpaged.benchmarks.serving_sim.hybrid_policies import LARGEST, NAIVE
from jpaged.benchmarks.serving_sim.policies import FASTER, MAX, ORACLE, PAGED, POW2

Say = Callable[[str], None]

ONE_KIND = (PAGED, UNCACHED, ORACLE, POW2, MAX, MAX_OF_TWICE, FASTER)
"""Policies of a model whose layers are alike, in which the largest page changes nothing."""
SEVERAL_KINDS = (PAGED, LARGEST, NAIVE, ORACLE, POW2, MAX)
"""Policies of a model whose layers differ."""
ALONE = 4
"""Requests that run one after another, to learn what a request takes alone."""
PRESSED = 2.0
"""Times what is answered of a batch, the rate at which the ways back of preempted requests are compared."""
PATIENCE = 6
"""Times the seconds of its arrivals after which a run is cut off."""


@dataclass(frozen=True)
class Plan:
    """Says how long everything is measured.

    Attributes:
        seconds: seconds of arrivals of a run; what arrived is answered to its end.
        shares: rates of the runs, as shares of what the policy serves of a batch that is there from the start. They are
            tried upwards; the first whose latency, as a mean over the seeds, is above the limit is a policy's last.
        seeds: seeds of arrivals and of which requests come; at least one.
        batch: requests of that batch.
        slower: the limit on latency, as a multiple of a request's normalised latency when it is alone.
    """

    seconds: float = 8.0
    shares: tuple[float, ...] = (1.4, 2.8, 4.0)
    seeds: tuple[int, ...] = (0, 1, 2)
    batch: int = 24
    slower: float = 4.0

    def __post_init__(self) -> None:
        if not (self.shares and self.seeds):
            raise ValueError(f"shares={self.shares} and seeds={self.seeds} must name at least one each")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds={self.seconds} must be above 0 and finite")
        for share in self.shares:
            if not 0 < share < math.inf:
                raise ValueError(f"share={share} must be above 0 and finite")
        if list(self.shares) != sorted(set(self.shares)):
            raise ValueError(f"shares={self.shares} must ascend")


@dataclass(frozen=True)
class Bench:
    """Serves by one policy after another on one engine, and tells what it does.

    Attributes:
        limit: seconds a token that a good answer takes at most; infinite before it is known.
    """

    host: Host
    texts: Texts
    plan: Plan
    say: Say
    limit: float = math.inf

    def tasks(self, number: int, seed: int, shares: dict[str, float]) -> list[Task]:
        """Return `number` requests of a mix, in tokens that the model has."""
        return within(arrange(self.texts, shares, number, seed), self.host.llm.vocab_size)

    def run(self, policy: RealPolicy, tasks: Sequence[Task], times: Sequence[float], rate: float) -> Row:
        """Serve tasks at their times by a policy, from an empty pool on."""
        self.host.use(policy)
        patience = PATIENCE * max(*times, self.plan.seconds) + 60
        served = self.host.serve(tasks, times, patience)
        row = measured(tasks, served.answers, min(answer.due for answer in served.answers), rate, Limits())
        good = [a for a in served.answers if a.error is None and a.normalised <= self.limit]
        row |= {"good": len(good), "goodput": len(good) / row["seconds"] if row["seconds"] else 0.0}
        row |= {"steps": served.steps, "computed": served.computed, "preemptions": served.preemptions}
        return row | {"cached": served.cached, "policy": policy.name}

    def saturation(self, policy: RealPolicy, shares: dict[str, float]) -> float:
        """Return the requests a second that a policy serves of a batch that is there from the start."""
        tasks = self.tasks(self.plan.batch, self.plan.seeds[0], shares)
        return float(self.run(policy, tasks, [0.0] * len(tasks), math.inf)["request_rate"])

    def alone(self) -> float:
        """Return the mean normalised latency of requests that run one after another."""
        policy, found = POLICIES[PAGED], []
        for task in self.tasks(ALONE, self.plan.seeds[0], KINDS):
            found.append(latency(self.run(policy, [task], [0.0], math.inf)))
        return sum(found) / len(found)

    def at(self, policy: RealPolicy, rate: float, seed: int, shares: dict[str, float]) -> Row:
        """Serve what arrives at a rate; the same requests, in the same order and at the same times for all policies."""
        number = max(2, round(rate * self.plan.seconds))
        row = self.run(policy, self.tasks(number, seed, shares), arrival_times(rate, number, seed), rate)
        self.say(
            f"{self.host.name}: {policy.name}, {rate:.2f}/s, seed {seed}: {1e3 * latency(row):.0f} ms a token, "
            f"{row['request_rate']:.2f}/s answered"
        )
        return row | {"seed": seed}


def load(bench: Bench, names: Sequence[str]) -> dict[str, Any]:
    """Return latencies by rate of each policy, and the rates that are sustained at the limit."""
    plan = bench.plan
    bench.run(POLICIES[PAGED], bench.tasks(2, 0, KINDS), [0.0, 0.0], math.inf)  # the first run of all is slower
    alone = bench.alone()
    bench = replace(bench, limit=plan.slower * alone)
    systems: dict[str, Any] = {}
    for name in names:
        most = bench.saturation(POLICIES[name], KINDS)
        bench.say(f"{bench.host.name}: {name} answers {most:.2f}/s of a batch")
        runs: list[Row] = []
        for share in plan.shares:
            runs += [bench.at(POLICIES[name], share * most, seed, KINDS) | {"share": share} for seed in plan.seeds]
            found = curve(name, runs, bench.limit)
            if not found["is_least"]:
                break
        systems[name] = {"saturation": most, "runs": runs} | found
    return {"model": bench.host.name, "says": bench.host.says, "alone": alone, "limit": bench.limit, "systems": systems}


def curve(name: str, runs: Sequence[Row], limit: float) -> dict[str, Any]:
    """Return a policy's mean latencies by rate, how far seeds lie apart, and the rate sustained at the limit: of their
    means, and of each seed, where 0 stands for less than the first rate. `is_least`: a seed was never above the limit,
    so that it sustains its last rate at least."""
    rates = sorted({row["rate"] for row in runs})
    points, spread = [], []
    for rate in rates:
        found = [latency(row) for row in runs if row["rate"] == rate]
        points.append((rate, sum(found) / len(found)))
        spread.append((rate, min(found), max(found)))
    each, is_least = [], False
    for seed in sorted({row["seed"] for row in runs}):
        its = sorted((row["rate"], latency(row)) for row in runs if row["seed"] == seed)
        each.append(Curve(name, tuple(its)).sustained(limit))
        is_least |= all(point[1] <= limit for point in its)
    return {
        "points": points,
        "spread": spread,
        "sustained": Curve(name, tuple(points)).sustained(limit),
        "sustained_by_seed": each,
        "is_least": is_least,
    }


def mechanisms(bench: Bench, limit: float) -> dict[str, list[Row]]:
    """Return runs of each mechanism's ways at jpaged's saturation, beyond it where requests are to be preempted: of
    chunks, preemption and the order of eviction."""
    bench = replace(bench, limit=limit)
    found: dict[str, list[Row]] = {}
    for name, policies, shares, share in (
        ("chunking", chunking(bench.host.llm.config.max_num_batched_tokens), KINDS, 1.0),
        ("preemption", returning(), {"chat": 1.0}, PRESSED),
        ("eviction", evicting(), SHARING, 1.0),
    ):
        most = bench.saturation(policies[0], shares)
        rate = share * most
        bench.say(f"{name}: {most:.2f}/s of a batch, {policies[0].name}")
        found[name] = [bench.at(policy, rate, seed, shares) for seed in bench.plan.seeds for policy in policies]
    return found


def policies_of(model: str, sizes: Sizes) -> tuple[str, ...]:
    """Return the policies that are compared on a model, without a reservation for more than the longest request where
    the pool has no room for that. A pool that has none for the longest request itself is refused by `scheduler_for`."""
    longest = {name: POLICIES[name].times_longest for name in (SEVERAL_KINDS if model == RANDOM else ONE_KIND)}
    most = sizes.pool_tokens // sizes.max_model_len
    return tuple(name for name, times in longest.items() if times <= max(most, 1))


def finite(value: Any) -> Any:
    """Return a value as JSON has it: what is infinite or not a number becomes None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
