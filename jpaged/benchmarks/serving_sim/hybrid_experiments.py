"""Runs the Jenga paper's experiments over time; each function returns plain data for the page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jpaged.benchmarks import memory_jenga
from jpaged.benchmarks.memory_traces import draw_articles, prompt_tokens
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
from jpaged.benchmarks.serving_sim.policy import Policy
from jpaged.benchmarks.serving_sim.simulation import Outcome, simulate
from jpaged.benchmarks.serving_sim.workload import Ask, Workload
from jpaged.scheduling import ScheduledStep

NUMBERS = {LONG: 80, VERY_LONG: 40, PICTURE: 160, SHORT: 600, ARTICLE: 100}
SOURCES = {LONG: "Mooncake", VERY_LONG: "Mooncake", ARTICLE: "arXiv summarization"}
LEAST_VERY_LONG = 60_000
ENDLESS = 8
"""A pool so many times larger than a case's binds nowhere."""
QUESTION = 43
"""Tokens of a question about an image, as in the Jenga paper."""
ARTICLES = (4, 8, 12)
SAMPLE_EVERY = 8


def _asks(context: Context, case: Case, rate: float) -> list[Ask]:
    """Draw a case's requests; at a rate of infinity all are there from the start."""
    served, number = case.served, NUMBERS[case.asked]
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


def _serve(case: Case, system: str, asks: list[Ask], **more: Any) -> Outcome:
    policy = build_hybrid(system, case.served.shape, _mean_length(asks), **more)
    return simulate(policy, _machine(case.served, policy), asks)


def throughput(context: Context) -> list[dict[str, Any]]:
    """Measure requests/s and the mean batch of decodes, all requests being there from the start (figure 14)."""
    rows = []
    for case in (*CASES, Case(DRAFTED, LONG, (1.0, 1.58)), *BINDING):
        if SOURCES.get(case.asked, "ShareGPT") not in context.workloads:
            continue
        asks = _asks(context, case, float("inf"))
        found = {}
        for system in HYBRID_SYSTEMS:
            outcome = _serve(case, system, asks)
            found[system] = {
                "throughput": outcome.throughput,
                "decode_batch": outcome.decode_batch,
                "refused": outcome.refused,
                "preemptions": outcome.preemptions,
            }
            context.say(f"{case.name}, {system}: {outcome.throughput:.3f} requests/s, {outcome.decode_batch:.1f}")
        shape = replace(case.served.shape, pool_gib=ENDLESS * case.served.shape.pool_gib)
        endless = _serve(replace(case, served=replace(case.served, shape=shape)), PAGED, asks)
        context.say(f"{case.name}, a pool that never binds: {endless.throughput:.3f}, {endless.decode_batch:.1f}")
        row: dict[str, Any] = {"model": case.name, "asked": case.asked, "paper": case.paper, "systems": found}
        row["pool"] = case.served.shape.pool_gib
        row["endless"] = {"throughput": endless.throughput, "decode_batch": endless.decode_batch}
        rows.append(row)
    return rows


def load(context: Context) -> list[dict[str, Any]]:
    """Measure the time to the first token and between tokens against the rate, Ministral and Llama 3.2 Vision."""
    rows = []
    for name, rates in (("Ministral-8B", (0.05, 0.1, 0.15, 0.2)), ("Llama-3.2-11B-Vision", (2.0, 4.0, 8.0, 12.0))):
        case = next(case for case in CASES if case.name == name)
        for rate in rates:
            asks = _asks(context, case, rate)
            for system in (PAGED, LARGEST):
                outcome = _serve(case, system, asks)
                row = {"model": name, "rate": rate, "system": system}
                rows.append(row | {"ttft": outcome.first_token, "tpot": outcome.token_seconds})
                context.say(f"{name}, {rate}/s, {system}: {outcome.first_token:.2f} s, {outcome.token_seconds:.4f} s")
    return rows


def memory_over_time(context: Context) -> list[dict[str, Any]]:
    """Measure what Ministral's pool holds as time goes on, and which share of it will be read."""
    case = next(case for case in CASES if case.name == "Ministral-8B")
    shape, asks, rows = case.served.shape, _asks(context, case, float("inf")), []
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
        rows.append({"system": system, "waste": waste, "points": thin, "pool": case.served.pool_bytes})
        context.say(f"Ministral-8B, {system}: {waste:.2%} of what is held will not be read")
    return rows


def articles(context: Context) -> list[dict[str, Any]]:
    """Measure throughput with the prefix cache on questions about more and more articles, Gemma-3-27B."""
    case = next(case for case in CASES if case.name == "Gemma-3-27B")
    rows = []
    for number in ARTICLES:
        demands = draw_articles(number, 80, context.seed)
        asks = [Ask(0.0, d.prompt, d.output, tokens=tuple(prompt_tokens(d, i))) for i, d in enumerate(demands)]
        for system in (PAGED, LARGEST):
            found = _serve(case, system, asks, prefix_caching=True)
            rows.append({"articles": number, "system": system, "throughput": found.throughput})
            context.say(f"{number} articles, {system}: {found.throughput:.3f} requests/s")
    return rows


def vision(context: Context) -> list[dict[str, Any]]:
    """Count the work of prompts with images without the vision cache, as a multiple of that with it."""
    found = [memory_jenga.vision_cache(m, t) for m in memory_jenga.VISION_MODELS for t in memory_jenga.STEP_TOKENS]
    return [{"model": v.model, "step_tokens": v.step_tokens, "runs": v.runs, "factor": v.factor} for v in found]
