"""Runs the PagedAttention paper's experiments (figures 12 to 19); each function returns plain data for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jpaged.benchmarks.memory_shapes import BLOCK_SIZE
from jpaged.benchmarks.serving_sim.beams import MadeUpRankings
from jpaged.benchmarks.serving_sim.curves import WARM_UP, Setting, compare, curve, number_of, run_at, seconds_for
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
FITTED_AT = {"ShareGPT": 2.0, "Alpaca": 30.0}
"""Requests/s of figure 13, whose batches of the paper's vLLM the engine was fitted to."""
DURATIONS = (0.2, 0.5, 1.0, 2.0, 7.2)
"""Lengths of runs, as multiples of those of all others, by which it is shown what a longer run would change."""
BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
PREEMPTING = 2.25
"""Requests/s of ShareGPT at which OPT-13B's pool is full, so that blocks of all sizes have to do with little memory and
there are preemptions to compare."""
BINDING_AT = {"ShareGPT": PREEMPTING, "Alpaca": 30.0}
"""Requests/s at which block sizes are compared."""
SAVING_AT = {"Alpaca": 4.0, "ShareGPT": 0.3}
"""Requests/s at which savings are measured, however many outputs each has: those of six are served too."""
CHECKED = 1000
"""Requests of a run at the rate that a policy sustains below which that rate is told with other seeds too."""
SEEDS = 5
"""How many seeds those are, the page's own among them."""
PREFIXES = ((1, 80), (5, 341))
"""Examples before every prompt, and their tokens (figure 16)."""
PREFIX_PART = 0.2
"""Share of the usual time for which requests with a shared prefix come: at their rates that is a thousand or more."""
SAMPLE_EVERY = 50
"""Steps from one look at what is saved to the next."""


TOGETHER = "the last two"
"""The change that is two of the others."""
PREFIX_CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "outputs twice as long": {"outputs": 2},
    "outputs four times as long": {"outputs": 4},
    "prompts in steps of their own": {"prompts_apart": True},
    "the prefix's KV read once a step": {"reads_once": True},
    TOGETHER: {"prompts_apart": True, "reads_once": True},
}
"""What is changed where the causes of figure 16's difference are told apart, each alone but in the last; the first is
the experiment as it is."""


@dataclass(frozen=True)
class Context:
    """Holds what all experiments are run with.

    Attributes:
        workloads: by their public names; "Alpaca" and others only where the user's folder has them.
        seconds: of arrivals, in every run of every experiment; of longer ones, where so few requests would come.
        say: is told what has been done.
        million: whether the host's cost of 1,000,000 requests is measured, which is extrapolated else.
    """

    workloads: dict[str, Workload]
    seconds: float
    seed: int
    say: Callable[[str], None]
    million: bool = False

    def setting(self, served: Served, workload: str, first_rate: float, **more: Any) -> Setting:
        known = self.workloads[workload]
        return Setting(served, known, PAPER_ENGINE, self.seconds, self.seed, first_rate, **more)

    def number(self, rate: float) -> int:
        """Return how many requests a run at one rate has: `curves.LEAST` at the least."""
        return number_of(rate, seconds_for(rate, self.seconds))


def _curves(
    context: Context, setting: Setting, systems: tuple[str, ...], *, checks_seeds: bool = False
) -> dict[str, Any]:
    """Return each system's points and sustained rate, how many requests come at that rate, and for how long.

    Args:
        checks_seeds: whether other seeds are asked for the rate of a system to which less than `CHECKED` come.
    """
    setting, curves = compare(setting, systems)
    found: dict[str, Any] = {}
    for system, made in curves.items():
        rate = made.sustained()
        number = setting.number(rate)
        found[system] = {"points": made.points, "sustained": rate, "is_least": made.is_least(), "requests": number}
        if checks_seeds and number < CHECKED:
            others = (replace(setting, seed=setting.seed + more) for more in range(1, SEEDS))
            found[system]["seeds"] = [rate, *(curve(other, system).sustained() for other in others)]
        context.say(f"{setting.name}, {system}: {rate:.2f} requests/s in runs of {setting.seconds:g} s")
    return {"name": setting.name, "systems": found, "seconds": setting.seconds}


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
        _curves(context, context.setting(served, workload, rate), SYSTEMS, checks_seeds=True)
        for served, workload, rate in places
        if workload in context.workloads
    ]


def several(context: Context) -> list[dict[str, Any]]:
    """Measure the same with several outputs, and with beams, of OPT-13B on Alpaca (figure 14)."""
    settings = [context.setting(OPT_13B, "Alpaca", 16.0 / n, n=n, beams=beams) for n, beams in DECODINGS]
    return [_curves(context, setting, FEWER) for setting in settings]


def batches(context: Context) -> list[dict[str, Any]]:
    """Measure the mean number of requests in the batch at the paper's rates (figure 13)."""
    rows = []
    for workload, rate in FITTED_AT.items():
        if workload in context.workloads:
            setting = context.setting(OPT_13B, workload, rate)
            found = {system: run_at(setting, system, rate, give_up=False).batch for system in ITERATION_LEVEL}
            rows.append({"workload": workload, "rate": rate, "requests": context.number(rate), "batch": found})
            context.say(f"batch sizes, {workload}: {found}")
    return rows


def durations(context: Context) -> list[dict[str, Any]]:
    """Measure jpaged's batch and latency at figure 13's rates in shorter and longer runs than all others are."""
    rows = []
    for workload, rate in FITTED_AT.items():
        if workload not in context.workloads:
            continue
        for times in DURATIONS:
            setting = replace(context.setting(OPT_13B, workload, rate), seconds=times * context.seconds)
            outcome = run_at(setting, PAGED, rate, give_up=False)
            row = {"workload": workload, "rate": rate, "seconds": setting.seconds, "requests": setting.number(rate)}
            rows.append(row | {"batch": outcome.batch, "latency": outcome.latency})
            context.say(f"{workload}, {setting.seconds:g} s: batch {outcome.batch:.2f}, {outcome.latency:.4f} s/token")
    return rows


def savings(context: Context) -> list[dict[str, Any]]:
    """Measure the share of blocks that several outputs and beams save (figure 15), as a mean over steps; the same
    requests at the same rate whatever the number of outputs."""
    rows = []
    for workload, rate in SAVING_AT.items():
        if workload not in context.workloads:
            continue
        number = context.number(rate)
        begin = WARM_UP * seconds_for(rate, context.seconds)
        for n, beams in DECODINGS:
            seen: list[float] = []
            turn = 0

            def watch(
                policy: Policy, step: ScheduledStep, clock: float, seen: list[float] = seen, begin: float = begin
            ) -> None:
                nonlocal turn
                turn += 1
                if turn % SAMPLE_EVERY == 0 and clock >= begin:
                    seen.append(policy.memory.report().saving)

            asks = context.workloads[workload].arrivals(rate, number, context.seed, n=n, beams=beams)
            rankings = MadeUpRankings(context.seed) if beams else None
            policy = build(PAGED, OPT_13B)
            simulate(policy, OPT_13B.machine(PAPER_ENGINE), asks, watch=watch, rankings=rankings)
            row = {"workload": workload, "n": n, "beams": beams, "rate": rate, "requests": number}
            rows.append(row | {"saving": mean(seen)})
            context.say(f"savings, {workload}, {'beam' if beams else 'n ='} {n}: {mean(seen):.1%}")
    return rows


def prefixes(context: Context) -> list[dict[str, Any]]:
    """Measure prompts that begin with 1 and 5 examples (80 and 341 tokens), LLaMA-13B (figure 16): as they are, and
    with what may set the ratio apart from the paper's, each alone: longer outputs, prompts in steps of their own, and a
    prefix whose KV a step reads once; and the last two together."""
    usual = context.workloads["WMT16"]
    rows = []
    for shots, tokens in PREFIXES:
        setting = context.setting(LLAMA_13B, "WMT16", 16.0, prefix=tokens)
        setting = replace(setting, seconds=PREFIX_PART * context.seconds)
        for change, more in PREFIX_CHANGES.items():
            longer = tuple((prompt, more.get("outputs", 1) * output) for prompt, output in usual.pairs)
            switches = {key: value for key, value in more.items() if key != "outputs"}
            changed = replace(setting, workload=Workload(f"{usual.name}, {change}", longer), **switches)
            row = {"shots": shots, "prefix": tokens, "held": _held(longer, tokens), "change": change}
            rows.append(row | _curves(context, changed, (PAGED, ORACLE)))
    return rows


def _held(pairs: Sequence[tuple[int, int]], prefix: int) -> tuple[float, float]:
    """Return the tokens that a mean request keeps at its end of its own: in blocks behind those of the prefix, and in a
    buddy allocator's region."""
    shared = prefix // BLOCK_SIZE * BLOCK_SIZE
    lengths = [prefix + prompt + output for prompt, output in pairs]
    own = mean(-(-(length - shared) // BLOCK_SIZE) * BLOCK_SIZE for length in lengths)
    return own, mean(1 << (length - 1).bit_length() for length in lengths)


def chatbot(context: Context) -> list[dict[str, Any]]:
    """Measure conversations whose last 1,024 tokens are the prompt, OPT-13B (figure 17): all, and the longest."""
    setting = context.setting(OPT_13B, "ShareGPT, several turns", 0.5)
    workload = setting.workload
    most = max(prompt for prompt, _ in workload.pairs)
    longest = tuple(pair for pair in workload.pairs if pair[0] == most)
    cut = Workload(f"{workload.name}, {most:,} tokens or more", longest)
    return [_curves(context, each, ITERATION_LEVEL) for each in (setting, replace(setting, workload=cut))]


def chatbot_costs(context: Context) -> list[dict[str, Any]]:
    """Measure the conversations on engines that take no time for what grows with a batch: reading KV, and the host's
    time for each sequence."""
    rows = []
    for reading, host in ((True, True), (False, True), (True, False), (False, False)):
        engine = PAPER_ENGINE if host else replace(PAPER_ENGINE, sequence_seconds=0.0)
        setting = context.setting(OPT_13B, "ShareGPT, several turns", 0.5, charges_kv=reading)
        found = _curves(context, replace(setting, engine=engine), (PAGED, ORACLE))
        rows.append(found | {"reading": reading, "host": host})
    return rows


def block_sizes(context: Context) -> list[dict[str, Any]]:
    """Measure the latency with blocks of several sizes, OPT-13B, at rates that fill the pool (figure 18b)."""
    rows = []
    for workload, rate in BINDING_AT.items():
        if workload not in context.workloads:
            continue
        asks = context.workloads[workload].arrivals(rate, context.number(rate), context.seed)
        for size in BLOCK_SIZES:
            machine = OPT_13B.machine(PAPER_ENGINE, block_size=size)
            outcome = simulate(build(PAGED, OPT_13B, block_size=size), machine, asks, warm_up=WARM_UP)
            row = {"workload": workload, "rate": rate, "requests": len(asks), "size": size}
            rows.append(row | {"latency": outcome.latency, "preemptions": outcome.preemptions})
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
            policy = build(PAGED, OPT_13B, block_size=size, preemption_mode=mode, **options)
            outcome = simulate(policy, machine, asks, warm_up=WARM_UP)
            row = {"size": size, "mode": mode, "requests": len(asks), "latency": outcome.latency}
            rows.append(row | {"preemptions": outcome.preemptions})
            context.say(f"{mode}, blocks of {size}: {outcome.latency:.4f} s/token, {outcome.preemptions} preemptions")
    return rows
