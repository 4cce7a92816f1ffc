"""Runs the PagedAttention paper's experiments (figures 12 to 19); each function returns plain data for the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jpaged.benchmarks.serving_sim.beams import MadeUpRankings
from jpaged.benchmarks.serving_sim.curves import Setting, curve, run_at
from jpaged.benchmarks.serving_sim.machine import PAPER_ENGINE, mean
from jpaged.benchmarks.serving_sim.models import LLAMA_13B, OPT_13B, OPT_66B, OPT_175B, Served
from jpaged.benchmarks.serving_sim.policies import MAX, ORACLE, PAGED, POW2, SYSTEMS, build
from jpaged.benchmarks.serving_sim.policy import Policy
from jpaged.benchmarks.serving_sim.simulation import simulate
from jpaged.benchmarks.serving_sim.workload import Workload
from jpaged.scheduling import ScheduledStep

ITERATION_LEVEL = (PAGED, ORACLE, POW2, MAX)
FEWER = (PAGED, ORACLE, MAX)
DECODINGS = tuple((n, beams) for beams in (False, True) for n in (2, 4, 6))
LEAST_SEVERAL = 200
"""Least requests of a run where each has several outputs."""
BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
PREEMPTING = 3.0
"""Requests/s of ShareGPT at which OPT-13B's pool is full, so that there are preemptions to compare."""


@dataclass(frozen=True)
class Context:
    """Holds what all experiments are run with.

    Attributes:
        workloads: by their public names; "Alpaca" and others only where the user's folder has them.
        seconds: of arrivals at each rate, less where a request has several outputs: over their number.
        most_requests: most requests of a run.
        say: is told what has been done.
    """

    workloads: dict[str, Workload]
    seconds: float
    seed: int
    say: Callable[[str], None]
    most_requests: int = 1 << 30

    def setting(self, served: Served, workload: str, first_rate: float, **more: Any) -> Setting:
        most, seconds = self.most_requests, self.seconds / more.get("n", 1)
        known = self.workloads[workload]
        return Setting(served, known, PAPER_ENGINE, seconds, self.seed, first_rate, most_requests=most, **more)

    def number(self, rate: float) -> int:
        """Return how many requests a run at one rate has."""
        return min(self.most_requests, int(rate * self.seconds))


def _curves(context: Context, setting: Setting, systems: tuple[str, ...]) -> dict[str, Any]:
    """Return each system's points and sustained rate."""
    found = {}
    for system in systems:
        made = curve(setting, system)
        found[system] = {"points": made.points, "sustained": made.sustained()}
        context.say(f"{setting.name}, {system}: {made.sustained():.2f} requests/s")
    return {"name": setting.name, "systems": found}


def load(context: Context) -> list[dict[str, Any]]:
    """Measure latency against rate with one output a request (figures 1 and 12)."""
    places = (
        (OPT_13B, "ShareGPT", 1.0),
        (OPT_13B, "Alpaca", 16.0),
        (OPT_66B, "ShareGPT", 0.5),
        (OPT_66B, "Alpaca", 8.0),
        (OPT_175B, "ShareGPT", 2.0),
        (OPT_175B, "Alpaca", 16.0),
    )
    return [
        _curves(context, context.setting(served, workload, rate), SYSTEMS)
        for served, workload, rate in places
        if workload in context.workloads
    ]


def several(context: Context) -> list[dict[str, Any]]:
    """Measure the same with several outputs, and with beams, of OPT-13B on Alpaca (figure 14)."""
    settings = [
        context.setting(OPT_13B, "Alpaca", 16.0 / n, n=n, beams=beams, least_requests=LEAST_SEVERAL)
        for n, beams in DECODINGS
    ]
    return [_curves(context, setting, FEWER) for setting in settings]


def batches(context: Context) -> list[dict[str, Any]]:
    """Measure the mean number of requests in the batch at the paper's rates (figure 13)."""
    rows = []
    for workload, rate in (("ShareGPT", 2.0), ("Alpaca", 30.0)):
        if workload in context.workloads:
            setting = context.setting(OPT_13B, workload, rate)
            found = {system: run_at(setting, system, rate, give_up=False).batch for system in ITERATION_LEVEL}
            rows.append({"workload": workload, "rate": rate, "batch": found})
            context.say(f"batch sizes, {workload}: {found}")
    return rows


def savings(context: Context) -> list[dict[str, Any]]:
    """Measure the share of blocks that several outputs and beams save (figure 15), over all steps' time."""
    rows = []
    for workload in ("Alpaca", "ShareGPT"):
        if workload not in context.workloads:
            continue
        for n, beams in DECODINGS:
            seen: list[float] = []
            turn = 0

            def watch(policy: Policy, step: ScheduledStep, clock: float, seen: list[float] = seen) -> None:
                nonlocal turn
                turn += 1
                if turn % 50 == 0:
                    seen.append(policy.memory.report().saving)

            rate = (8.0 if workload == "Alpaca" else 0.5) / n
            number = max(60, context.number(rate) // 2)
            asks = context.workloads[workload].arrivals(rate, number, context.seed, n=n, beams=beams)
            rankings = MadeUpRankings(context.seed) if beams else None
            policy = build(PAGED, OPT_13B)
            simulate(policy, OPT_13B.machine(PAPER_ENGINE), asks, watch=watch, rankings=rankings)
            rows.append({"workload": workload, "n": n, "beams": beams, "saving": mean(seen)})
            context.say(f"savings, {workload}, {'beam' if beams else 'n ='} {n}: {mean(seen):.1%}")
    return rows


def prefixes(context: Context) -> list[dict[str, Any]]:
    """Measure prompts that begin with 1 and 5 examples (80 and 341 tokens), LLaMA-13B (figure 16)."""
    return [
        {"shots": shots} | _curves(context, context.setting(LLAMA_13B, "WMT16", 8.0, prefix=tokens), (PAGED, ORACLE))
        for shots, tokens in ((1, 80), (5, 341))
    ]


def chatbot(context: Context) -> list[dict[str, Any]]:
    """Measure conversations whose last 1,024 tokens are the prompt, OPT-13B (figure 17): all, and the longest."""
    setting = context.setting(OPT_13B, "ShareGPT, several turns", 0.5)
    workload = setting.workload
    most = max(prompt for prompt, _ in workload.pairs)
    longest = tuple(pair for pair in workload.pairs if pair[0] == most)
    cut = Workload(f"{workload.name}, {most:,} tokens or more", longest)
    return [_curves(context, each, ITERATION_LEVEL) for each in (setting, replace(setting, workload=cut))]


def block_sizes(context: Context) -> list[dict[str, Any]]:
    """Measure the latency with blocks of several sizes, OPT-13B (figure 18b)."""
    rows = []
    for workload, rate in (("ShareGPT", 2.0), ("Alpaca", 30.0)):
        if workload not in context.workloads:
            continue
        asks = context.workloads[workload].arrivals(rate, context.number(rate), context.seed)
        for size in BLOCK_SIZES:
            machine = OPT_13B.machine(PAPER_ENGINE, block_size=size)
            outcome = simulate(build(PAGED, OPT_13B, block_size=size), machine, asks)
            rows.append({"workload": workload, "rate": rate, "size": size, "latency": outcome.latency})
            context.say(f"blocks of {size}, {workload}: {outcome.latency:.4f} s/token")
    return rows


def returning(context: Context) -> list[dict[str, Any]]:
    """Measure recomputation against swapping where requests are preempted, OPT-13B on ShareGPT (figure 19)."""
    rate = PREEMPTING
    asks = context.workloads["ShareGPT"].arrivals(rate, context.number(rate), context.seed)
    rows = []
    for size in BLOCK_SIZES:
        machine = OPT_13B.machine(PAPER_ENGINE, block_size=size)
        for mode in ("recompute", "swap"):
            pool = OPT_13B.pool_bytes // (OPT_13B.token_bytes * size) * OPT_13B.token_bytes * size
            options = {"swap_space_bytes": pool} if mode == "swap" else {}
            outcome = simulate(build(PAGED, OPT_13B, block_size=size, preemption_mode=mode, **options), machine, asks)
            row = {"size": size, "mode": mode, "latency": outcome.latency, "preemptions": outcome.preemptions}
            rows.append(row)
            context.say(f"{mode}, blocks of {size}: {outcome.latency:.4f} s/token, {outcome.preemptions} preemptions")
    return rows
