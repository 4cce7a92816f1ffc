"""Runs the Jenga paper's experiments over time; each function returns plain data for the page."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from jpaged.benchmarks import memory_jenga
from jpaged.benchmarks.memory_shapes import ModelShape
from jpaged.benchmarks.memory_traces import draw_articles, prompt_tokens
from jpaged.benchmarks.serving_sim.curves import WARM_UP, number_of, seconds_for
from jpaged.benchmarks.serving_sim.hybrid_models import (
    ARTICLE,
    BINDING,
    CASES,
    DRAFTED,
    LONG,
    PICTURE,
    SHORT,
    VERY_LONG,
    Case,
)
from jpaged.benchmarks.serving_sim.hybrid_policies import (
    HYBRID_SYSTEMS,
    LARGEST,
    build_hybrid,
    held_bytes,
)
from jpaged.benchmarks.serving_sim.machine import RECENT_ENGINE, Machine, mean
from jpaged.benchmarks.serving_sim.models import Served
from jpaged.benchmarks.serving_sim.paged_experiments import Context
from jpaged.benchmarks.serving_sim.policies import PAGED
from jpaged.benchmarks.serving_sim.policy import BUDGET, Job, Policy
from jpaged.benchmarks.serving_sim.simulation import Outcome, simulate
from jpaged.benchmarks.serving_sim.workload import Ask, Workload
from jpaged.memory import PoolLayout
from jpaged.scheduling import ScheduledStep

NUMBERS = {LONG: 80, VERY_LONG: 40, PICTURE: 160, SHORT: 600, ARTICLE: 100}
SOURCES = {LONG: "Mooncake", VERY_LONG: "Mooncake", ARTICLE: "arXiv summarization"}
LEAST_VERY_LONG = 60_000
RATES = {"Ministral-8B": (0.05, 0.1, 0.15, 0.175), "Llama-3.2-11B-Vision": (2.0, 4.0, 6.0, 8.0)}
"""Requests/s of the models whose first tokens are measured over time."""
SPARE = 1.05
"""An endless pool is so many times what all requests need, as a pool's last per cents are kept free."""
QUESTION = 43
"""Tokens of a question about an image, as in the Jenga paper."""
ARTICLES = (4, 8, 12)
QUESTIONS = 80
"""Questions about articles in a run, all sent at once."""
SAMPLE_EVERY = 8


def _asks(context: Context, case: Case, rate: float = math.inf, seconds: float = 0.0) -> list[Ask]:
    """Draw a case's requests: those of some seconds at a rate; or, at a rate of infinity, as many as `NUMBERS` says,
    all of which are there from the start."""
    served, number = case.served, NUMBERS[case.asked] if math.isinf(rate) else number_of(rate, seconds)
    source = context.workloads[SOURCES.get(case.asked, "ShareGPT")]
    most = served.shape.max_len - 4096
    pairs = tuple((min(p, most), min(o, 4096)) for p, o in source.pairs)
    if case.asked == VERY_LONG:
        pairs = tuple((p, o) for p, o in pairs if p >= LEAST_VERY_LONG)
    if case.asked == PICTURE:
        inline = served.shape.image_tokens - served.shape.encoder_tokens
        pairs = tuple((QUESTION + inline, o) for _, o in pairs)
    return Workload(source.name, pairs).arrivals(rate, number, context.seed)


def _mean_length(asks: list[Ask]) -> int:
    return sum(ask.prompt + ask.output for ask in asks) // len(asks)


def _machine(served: Served, policy: Policy) -> Machine:
    return replace(served.machine(RECENT_ENGINE), shift=policy.shift)


def _serve(
    case: Case, system: str, asks: list[Ask], *, warm_up: float = 0.0, mean_length: int | None = None, **more: Any
) -> Outcome:
    policy = build_hybrid(system, case.served.shape, mean_length or _mean_length(asks), **more)
    return simulate(policy, _machine(case.served, policy), asks, warm_up=warm_up)


def accepted(case: Case, system: str, asks: list[Ask], mean_length: int) -> list[bool]:
    """Tell of each request whether a policy takes it: whether it fits the empty pool."""
    policy, found = build_hybrid(system, case.served.shape, mean_length), []
    for ask in asks:
        before = policy.refused
        policy.arrive(Job(ask))
        found.append(policy.refused == before)
    return found


def endless(shape: ModelShape, asks: list[Ask]) -> ModelShape:
    """Return a shape whose pool holds all of some requests at once, whatever blocks are rounded up to."""
    groups = shape.groups()
    page = PoolLayout.plan(groups, int(shape.pool_gib * 2**30)).page_bytes
    needed = sum(
        spec.real_bytes
        * spec.policy.for_request(shape.image_tokens)
        .for_prefix(0, 0)
        .peak_blocks(ask.prompt + ask.output, min(BUDGET, ask.prompt), spec.block_size)
        + 2 * page
        for ask in asks
        for spec in groups
    )
    return replace(shape, pool_gib=max(shape.pool_gib, SPARE * needed / 2**30))


def throughput(context: Context) -> list[dict[str, Any]]:
    """Measure requests/s and the mean batch of decodes, all requests being there from the start (figure 14).

    A row's policies all get the same requests: those that every one of them can hold.
    """
    rows = []
    for case in (*CASES, Case(DRAFTED, LONG, (1.0, 1.58)), *BINDING):
        if SOURCES.get(case.asked, "ShareGPT") not in context.workloads:
            continue
        drawn = _asks(context, case)
        length = _mean_length(drawn)
        taken = {system: accepted(case, system, drawn, length) for system in HYBRID_SYSTEMS}
        asks = [ask for place, ask in enumerate(drawn) if all(its[place] for its in taken.values())]
        found = {}
        for system in HYBRID_SYSTEMS:
            outcome = _serve(case, system, asks, mean_length=length)
            found[system] = {
                "throughput": outcome.throughput,
                "decode_batch": outcome.decode_batch,
                "refused": taken[system].count(False),
                "preemptions": outcome.preemptions,
            }
            context.say(f"{case.name}, {system}: {outcome.throughput:.3f} requests/s, {outcome.decode_batch:.1f}")
        free = replace(case, served=replace(case.served, shape=endless(case.served.shape, asks)))
        most = _serve(free, PAGED, asks)
        context.say(f"{case.name}, a pool that never binds: {most.throughput:.3f}, {most.decode_batch:.1f}")
        row: dict[str, Any] = {"model": case.name, "asked": case.asked, "paper": case.paper, "systems": found}
        row |= {"pool": case.served.shape.pool_gib, "sent": len(drawn), "requests": len(asks)}
        row["endless"] = {"throughput": most.throughput, "decode_batch": most.decode_batch}
        rows.append(row)
    return rows


def load(context: Context) -> list[dict[str, Any]]:
    """Measure the time to the first token and between tokens against the rate, Ministral and Llama 3.2 Vision."""
    rows = []
    for name, rates in RATES.items():
        case = next(case for case in CASES if case.name == name)
        seconds = seconds_for(min(rates), context.seconds)
        for rate in rates:
            asks = _asks(context, case, rate, seconds)
            for system in (PAGED, LARGEST):
                outcome = _serve(case, system, asks, warm_up=WARM_UP)
                row = {"model": name, "rate": rate, "system": system, "seconds": seconds, "requests": len(asks)}
                rows.append(row | {"ttft": outcome.first_token, "tpot": outcome.token_seconds})
                context.say(f"{name}, {rate}/s, {system}: {outcome.first_token:.2f} s, {outcome.token_seconds:.4f} s")
    return rows


def memory_over_time(context: Context) -> list[dict[str, Any]]:
    """Measure what Ministral's pool holds as time goes on, and which share of it will be read."""
    case = next(case for case in CASES if case.name == "Ministral-8B")
    shape, asks, rows = case.served.shape, _asks(context, case), []
    for system in HYBRID_SYSTEMS:
        points: list[tuple[float, float, float]] = []
        turn = 0

        def watch(policy: Policy, step: ScheduledStep, clock: float, points: list[Any] = points) -> None:
            nonlocal turn
            turn += 1
            held = held_bytes(policy) if turn % SAMPLE_EVERY == 0 else 0
            if held:
                running = (request.sequences[0].num_computed for request in policy.scheduler.running)
                needed = sum(shape.needed_bytes(max(0, length)) for length in running)
                points.append((clock, needed, held))

        policy = build_hybrid(system, shape, _mean_length(asks))
        simulate(policy, _machine(case.served, policy), asks, watch=watch)
        waste = mean(1 - min(1.0, needed / held) for _, needed, held in points)
        thin = points[:: max(1, len(points) // 200)]
        row = {"system": system, "requests": len(asks), "waste": waste, "points": thin}
        rows.append(row | {"pool": case.served.pool_bytes})
        context.say(f"Ministral-8B, {system}: {waste:.2%} of what is held will not be read")
    return rows


def articles(context: Context) -> list[dict[str, Any]]:
    """Measure throughput with the prefix cache on questions about more and more articles, Gemma-3-27B."""
    case = next(case for case in CASES if case.name == "Gemma-3-27B")
    rows = []
    for number in ARTICLES:
        demands = draw_articles(number, QUESTIONS, context.seed)
        asks = [Ask(0.0, d.prompt, d.output, tokens=tuple(prompt_tokens(d, i))) for i, d in enumerate(demands)]
        for system in (PAGED, LARGEST):
            found = _serve(case, system, asks, prefix_caching=True)
            row = {"articles": number, "system": system, "requests": len(asks), "throughput": found.throughput}
            rows.append(row)
            context.say(f"{number} articles, {system}: {found.throughput:.3f} requests/s")
    return rows


def vision(context: Context) -> list[dict[str, Any]]:
    """Count the work of prompts with images without the vision cache, as a multiple of that with it."""
    found = [memory_jenga.vision_cache(m, t) for m in memory_jenga.VISION_MODELS for t in memory_jenga.STEP_TOKENS]
    return [{"model": v.model, "step_tokens": v.step_tokens, "runs": v.runs, "factor": v.factor} for v in found]
