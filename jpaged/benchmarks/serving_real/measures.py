"""Says what a run gave: latencies, goodput, and what of them several seeds agree on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jpaged.benchmarks.serving_answer import Answer
from jpaged.benchmarks.serving_real.workload import Task
from jpaged.benchmarks.serving_report import Limits, summarise

Row = dict[str, Any]


def measured(tasks: Sequence[Task], answers: Sequence[Answer], start: float, rate: float, limits: Limits) -> Row:
    """Return the figures of a run as JSON has them; latencies are in seconds.

    Args:
        answers: those of `tasks`, in their order.
        start: when the first was due.
        rate: requests a second; infinite = all at once.

    Raises:
        ValueError: an answer is whole but shorter or longer than was asked for.
    """
    for task, answer in zip(tasks, answers, strict=True):
        if answer.error is None and answer.output_tokens != task.output:
            raise ValueError(f"an answer has {answer.output_tokens} tokens, and {task.output} were asked for")
    whole = [answer for answer in answers if answer.error is None]
    row = summarise(rate, len(tasks), answers, start, limits).as_json()
    values = [answer.normalised for answer in whole]
    row["normalised"] = _spread(values) | {"all": len(whole) == len(tasks)}
    kinds: dict[str, list[float]] = {}
    for task, answer in zip(tasks, answers, strict=True):
        if answer.error is None:
            kinds.setdefault(task.kind, []).append(answer.normalised)
    row["by_kind"] = {kind: float(np.mean(its)) for kind, its in sorted(kinds.items())}
    return row


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(("mean", "p50", "p99"))
    return {"mean": float(np.mean(values)), "p50": float(np.median(values)), "p99": float(np.percentile(values, 99))}


def latency(row: Row) -> float:
    """Return a run's mean normalised latency, seconds a token; infinite where requests were cut off."""
    found = row["normalised"]
    return float(found["mean"]) if found["all"] and found["mean"] is not None else math.inf


def over_seeds(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean, the least and the most of one figure of several seeds; NaN without any."""
    if not values:
        return math.nan, math.nan, math.nan
    return sum(values) / len(values), min(values), max(values)


def figure(rows: Sequence[Row], *names: str) -> tuple[float, float, float]:
    """Return `over_seeds` of a figure by its path in each row, such as ("ttft", "p99"), without rows that lack it."""
    values = []
    for row in rows:
        value: Any = row
        for name in names:
            value = value[name]
        if value is not None:
            values.append(float(value))
    return over_seeds(values)
