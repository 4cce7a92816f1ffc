"""Writes what known lengths of outputs are worth, and says whether any source of them wins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jpaged.benchmarks.eviction.output_lengths import WINS
from jpaged.benchmarks.serving_sim.machine import mean
from jpaged.benchmarks.serving_sim.tables import table

Rows = Sequence[dict[str, Any]]

ORACLE = "Oracle"
"""The source that knows all lengths, and so is no predictor."""


def seeds_of(rows: Rows) -> str:
    """Return how many seeds there are, for readers."""
    number = len({row["seed"] for row in rows})
    return "one seed" if number == 1 else f"{number} seeds"


def length_table(rows: Rows) -> str:
    """Return a line for each workload, rate, source of lengths and use of them, over all seeds."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["workload"], row["rate"], row["source"], row["use"]), []).append(row)
    lines = []
    for (workload, rate, source, use), mine in groups.items():
        lines.append(
            [
                f"{workload}, {rate:g}/s",
                f"{mine[0]['requests']:,}",
                source,
                use,
                _spread([1e3 * row["latency"] for row in mine], 0),
                _spread([_times(rows, row) for row in mine], 2),
                _spread([row["preemptions"] for row in mine], 0),
            ]
        )
    head = ["workload", "requests", "lengths from", "used for", "ms/token", "none = 1", "preemptions"]
    return table(head, lines)


def length_verdict(rows: Rows) -> str:
    """Return what the table says of each source and use, and whether one that could be had wins."""
    said, winners, better = [], [], []
    for source in dict.fromkeys(row["source"] for row in rows if row["source"] != "none"):
        uses = []
        for use in dict.fromkeys(row["use"] for row in rows if row["source"] == source):
            found = [_times(rows, row) for row in rows if (row["source"], row["use"]) == (source, use)]
            uses.append(f"{use} {mean(found):.2f} ({min(found):.2f} to {max(found):.2f})")
            if source == ORACLE:
                continue
            if max(found) <= 1 - WINS:
                winners.append(f"{source} for {use}")
            elif mean(found) < 1:
                better.append(f"{source} for {use} ({mean(found):.2f})")
        said.append(f"- {source}: latency as a multiple of that without is, for {', '.join(uses)}.")
    wins = f"A source is worth having in the engine where it saves {WINS:.0%} of the latency in every run of every seed"
    if winners:
        verdict = f"{wins}: this holds for {', '.join(winners)}, which the engine should have."
    else:
        verdict = f"{wins}: no guess or hint does."
        if better:
            verdict += f" Better than nothing on the average are {', '.join(better)}."
        verdict += " So the engine has no predictor of lengths, and the newest request gives way."
    return "\n".join(said) + f"\n\n{verdict}\n"


def _times(rows: Rows, row: dict[str, Any]) -> float:
    """Return a run's latency over that of the same requests without any length told."""
    plain = next(
        other
        for other in rows
        if other["source"] == "none" and all(other[key] == row[key] for key in ("workload", "rate", "seed"))
    )
    return float(row["latency"] / plain["latency"])


def _spread(values: Iterable[float], digits: int) -> str:
    """Return the mean, with the least and the most where these differ."""
    values = list(values)
    least, most = f"{min(values):,.{digits}f}", f"{max(values):,.{digits}f}"
    told = f"{mean(values):,.{digits}f}"
    return told if least == most else f"{told} ({least}-{most})"
