"""Says what the figures of docs/serving-real.md come to: which goals are reached, and what is worth what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.benchmarks.serving_real import tables
from jpaged.benchmarks.serving_real.host import RANDOM
from jpaged.benchmarks.serving_real.measures import Row, latency, over_seeds
from jpaged.benchmarks.serving_real.policies import MAX_OF_TWICE, TWICE
from jpaged.benchmarks.serving_sim.policies import MAX, ORACLE, PAGED
from jpaged.config import EngineConfig

GOALS = {MAX: 2.0, MAX_OF_TWICE: 2.0, ORACLE: 1.3}
"""What the sustained rate is to be as a multiple, at the least, where memory binds."""

DEFAULT = str(EngineConfig.__dataclass_fields__["prefix_eviction"].default)

PAPER = (
    "The PagedAttention paper tells 1.7 to 2.7 times Oracle's rate and 2.7 to 8 times Max's of its vLLM, on GPUs and "
    "without prefix caching."
)


PAPERS_TOKENS, PAPERS_LONGEST = 499, 2048
"""Tokens of ShareGPT's requests in the mean (figure 11), and of OPT's longest (section 6.1)."""
_LOW = "as {name} sustains less than its lowest rate by the others"


def goals(load: Mapping[str, Any]) -> str:
    """Say of each goal whether it is reached; where the other's rate is only known from below, that is not known."""
    paged, told = load["systems"][PAGED], []
    mine = paged["sustained_by_seed"]
    for name, goal in GOALS.items():
        if name not in load["systems"]:
            continue
        system = load["systems"][name]
        other = system["sustained_by_seed"]
        if system["is_least"]:
            batch = paged["saturation"] / system["saturation"]
            told.append(
                f"whether {goal:g} times {name}'s rate is reached is not known, as {name} stayed below the limit at "
                f"every rate by a seed (of a batch that is there from the start jpaged answers {batch:.2f} times as "
                "much)"
            )
            continue
        ratios = [a / b for a, b in zip(mine, other, strict=True) if b]
        if not ratios:
            told.append(f"{name} sustains no rate that was measured")
            continue
        least = "at least " if paged["is_least"] else ""
        seeds = "" if len(ratios) == len(mine) else f", of {len(ratios)} of {len(mine)} seeds, {_LOW.format(name=name)}"
        told.append(f"{goal:g} times {name}'s rate is {_verdict(ratios, goal, least, seeds)}")
    if not told:
        return ""
    return f"The goals: {'; '.join(told)}. {PAPER if load['model'] != RANDOM else ''}".rstrip()


def _verdict(ratios: Sequence[float], goal: float, least: str, seeds: str) -> str:
    """Say whether the mean of the seeds reaches a goal, with how far they lie apart, and which of them say otherwise.

    Args:
        least: what stands before ratios that are only known from below; "" = they are known.
        seeds: what is to be said where not every seed has a ratio.
    """
    mean, low, high = over_seeds(ratios)
    reached = "reached" if mean >= goal else "not known" if least else "not reached"
    others = sum((ratio >= goal) != (mean >= goal) for ratio in ratios)
    if not others:
        apart = f", by seed {low:.2f} to {high:.2f}" if f"{low:.2f}" != f"{high:.2f}" else ""
        return f"{reached} ({least}{mean:.2f}{apart}{seeds})"
    does = "is below it" if mean >= goal else "reaches it"
    if others > 1:
        does = "are below it" if mean >= goal else "reach it"
    how = f"{reached} by the mean of the seeds{' and not by each of them' * (mean >= goal)}"
    return f"{how} ({least}{mean:.2f}, by seed {low:.2f} to {high:.2f}: {others} of {len(ratios)} {does}{seeds})"


def lengths(load: Mapping[str, Any], longest: int) -> str:
    """Say how long requests are beside the longest, for which `MAX` reserves, and what they were in the paper; nothing
    without `MAX`."""
    if MAX not in load["systems"]:
        return ""
    rows = [row for row in load["systems"][PAGED]["runs"] if row["completed"]]
    tokens = sum(row["prompt_tokens"] + row["output_tokens"] for row in rows)
    mean = tokens / max(1, sum(row["completed"] for row in rows))
    reserved = f"of the longest, for which {MAX} reserves"
    if MAX_OF_TWICE in load["systems"]:
        reserved += f", and {mean / longest / TWICE:.2f} of that of {MAX_OF_TWICE}"
    return (
        f"A request has {mean:.0f} tokens, which is {mean / longest:.2f} {reserved}. "
        f"ShareGPT's in the paper have {PAPERS_TOKENS}, {PAPERS_TOKENS / PAPERS_LONGEST:.2f} of {PAPERS_LONGEST:,}: "
        "the smaller that share, the more is reserved in vain, and the more it is worth to take blocks as tokens come."
    )


def ahead(found: Mapping[str, Any]) -> str:
    """Say whether jpaged's p99 of whole answers is below each other engine's."""
    worst = {
        name: over_seeds([row["latency"]["p99"] for row in found["runs"] if row["engine"] == name])[0]
        for name in found["saturation"]
    }
    told, is_ahead = [], True
    for name, theirs in worst.items():
        if name != PAGED:
            is_ahead &= worst[PAGED] < theirs
            told.append(f"{'below' if worst[PAGED] < theirs else 'above'} {name}'s ({theirs:.2f} s)")
    rate = found["rate"]
    shares = ", ".join(f"{rate / most:.2f} of {name}'s" for name, most in found["saturation"].items())
    best = max(found["saturation"].values())
    return (
        f"jpaged's p99 of whole answers, {worst[PAGED]:.2f} s, is {' and '.join(told)}. The goal, to be below all of "
        f"them, is {'reached' if is_ahead else 'not reached'}. The rate, {rate:.2f} requests/s, is {rate / best:.2f} "
        f"of the best one's own batch rate; as shares of each engine's own it is {shares}.\n"
    )


def against_lru(rows: Sequence[Row]) -> str:
    """Say what the default order of eviction is worth beside "lru", over the seeds."""
    by_seed: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_seed.setdefault(row["policy"], {})[row["seed"]] = row
    mine, plain = by_seed.get(DEFAULT), by_seed.get("lru")
    if not mine or not plain or DEFAULT == "lru":
        return ""
    seeds = [seed for seed in mine if seed in plain and latency(plain[seed]) < math.inf]
    times = over_seeds([latency(mine[seed]) / latency(plain[seed]) for seed in seeds])
    found = [
        100 * sum(row["cached"] for row in its.values()) / max(1, sum(row["prompt_tokens"] for row in its.values()))
        for its in (mine, plain)
    ]
    return (
        f'The default, "{DEFAULT}", takes {tables.spread(times, 2)} times as long a token as "lru", and finds '
        f"{found[0]:.0f} % of the prompts' tokens against {found[1]:.0f} %."
    )
