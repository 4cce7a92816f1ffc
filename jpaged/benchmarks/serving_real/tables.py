"""Writes what was measured as Markdown tables; three numbers "a (b-c)" are the mean, least and most of the seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.benchmarks.serving_real.measures import Row, figure, over_seeds
from jpaged.benchmarks.serving_sim.policies import PAGED
from jpaged.benchmarks.serving_sim.tables import table


def sustained(load: Mapping[str, Any]) -> str:
    """Return the rates that each policy sustains at the limit, and jpaged's as multiples, of seeds where both are
    known: at most that where the other's is only known from below."""
    systems = load["systems"]
    mine = systems[PAGED]
    lines = []
    for name, found in systems.items():
        each = [_ratio(a, b) for a, b in zip(mine["sustained_by_seed"], found["sustained_by_seed"], strict=True)]
        ratios = [ratio for ratio in each if ratio is not None]
        least = "at least " if found["is_least"] else ""
        known = [rate for rate in found["sustained_by_seed"] if rate]
        rates = least + spread(over_seeds(known), 2) if known else "-"
        if unknown := len(found["sustained_by_seed"]) - len(known):
            rates += f"; {unknown} of {len(found['sustained_by_seed'])} seeds below {found['points'][0][0]:.2f}"
        times = "" if name == PAGED or not ratios else spread(over_seeds(ratios), 2)
        if times and found["is_least"]:
            times = "" if mine["is_least"] else f"at most {times}"
        elif times and mine["is_least"]:
            times = f"at least {times}"
        lines.append([name, f"{found['saturation']:.2f}", rates, times])
    head = ["policy", "batch, requests/s", f"sustained at {1e3 * load['limit']:.0f} ms a token", "jpaged / it"]
    return table(head, lines)


def latencies(load: Mapping[str, Any]) -> str:
    """Return the figures of each policy and rate."""
    lines = []
    for name, found in load["systems"].items():
        for share in sorted({row["share"] for row in found["runs"]}):
            rows = [row for row in found["runs"] if row["share"] == share]
            lines.append([name, f"{rows[0]['rate']:.2f}", *_cells(rows)])
    return table(["policy", "requests/s", *HEAD], lines)


HEAD = (
    "ms a token",
    "p99",
    "first token, s",
    "p99",
    "between tokens, ms",
    "p99",
    "good requests/s",
    "preemptions",
    "cached tokens",
)


def _cells(rows: Sequence[Row]) -> list[str]:
    return [
        spread(_thousand(figure(rows, "normalised", "mean"))) + "*" * (not all(r["normalised"]["all"] for r in rows)),
        spread(_thousand(figure(rows, "normalised", "p99"))),
        spread(figure(rows, "ttft", "mean"), 2),
        spread(figure(rows, "ttft", "p99"), 2),
        spread(_thousand(figure(rows, "inter_token", "mean"))),
        spread(_thousand(figure(rows, "inter_token", "p99"))),
        spread(figure(rows, "goodput"), 2),
        f"{sum(row['preemptions'] for row in rows)}",
        f"{100 * sum(r['cached'] for r in rows) / max(1, sum(r['prompt_tokens'] for r in rows)):.0f} %",
    ]


def by_kind(load: Mapping[str, Any]) -> str:
    """Return the normalised latency of each kind of request at the lowest rate at which all policies were measured."""
    share = min(row["share"] for row in load["systems"][PAGED]["runs"])
    runs = {name: [r for r in s["runs"] if r["share"] == share] for name, s in load["systems"].items()}
    kinds = sorted({kind for rows in runs.values() for row in rows for kind in row["by_kind"]})
    lines = []
    for name, rows in runs.items():
        cells = [[row["by_kind"][kind] for row in rows if kind in row["by_kind"]] for kind in kinds]
        lines.append([name, *(spread(_thousand(over_seeds(cell))) for cell in cells)])
    return table(["ms a token", *kinds], lines)


def ways(rows: Sequence[Row]) -> str:
    """Return the figures of each way of a mechanism, at one rate."""
    lines = []
    for name in dict.fromkeys(row["policy"] for row in rows):
        lines.append([name, *_cells([row for row in rows if row["policy"] == name])])
    return table([f"at {rows[0]['rate']:.2f} requests/s", *HEAD], lines)


def peers(found: Mapping[str, Any]) -> str:
    """Return the latencies of each engine at the same arrivals."""
    lines = []
    for name, most in found["saturation"].items():
        rows = [row for row in found["runs"] if row["engine"] == name]
        cells = [
            spread(_thousand(figure(rows, "normalised", "mean"))),
            spread(figure(rows, "ttft", "p99"), 2),
            spread(_thousand(figure(rows, "inter_token", "p99"))),
            spread(figure(rows, "latency", "p50"), 2),
            spread(figure(rows, "latency", "p99"), 2),
        ]
        lines.append([name, f"{most:.2f}", *cells])
    head = [f"at {found['rate']:.2f} requests/s", "batch, requests/s", "ms a token", "first token p99, s"]
    return table([*head, "between tokens p99, ms", "whole answer p50, s", "p99, s"], lines)


def spread(values: tuple[float, float, float], digits: int = 0) -> str:
    """Return a mean with the least and the most of the seeds, where these differ; "-" where nothing was measured."""
    mean, least, most = values
    if math.isnan(mean):
        return "-"
    told = f"{mean:.{digits}f}"
    low, high = f"{least:.{digits}f}", f"{most:.{digits}f}"
    return told if low == high else f"{told} ({low}-{high})"


def _thousand(values: tuple[float, float, float]) -> tuple[float, float, float]:
    mean, least, most = values
    return 1e3 * mean, 1e3 * least, 1e3 * most


def _ratio(mine: float, other: float) -> float | None:
    return mine / other if other else None
