"""Reports of `jpaged bench serve` for each rate: latencies, throughput, goodput, errors; table, JSON and plot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from jpaged.bench.client import Answer


@dataclass(frozen=True)
class Limits:
    """Limits that a good answer meets, in seconds; None = no limit.

    Attributes:
        ttft: to the first text.
        per_token: for each token after the first, on average over the answer.
        latency: to the end.
    """

    ttft: float | None = None
    per_token: float | None = None
    latency: float | None = None

    def met_by(self, answer: Answer) -> bool:
        """Tell whether a whole answer meets all limits."""
        values = (answer.ttft, answer.seconds_per_token, answer.latency)
        limits = (self.ttft, self.per_token, self.latency)
        return all(limit is None or value <= limit for value, limit in zip(values, limits, strict=True))


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of a latency, in seconds; NaN where nothing was measured."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of some values."""
        if not values:
            return cls(math.nan, math.nan, math.nan, math.nan)
        return cls(float(np.mean(values)), *map(float, np.percentile(values, (50, 90, 99))))


@dataclass(frozen=True)
class RateReport:
    """The results of one rate; failed requests count in no latency.

    Attributes:
        rate: planned requests a second; infinite = all at once.
        planned: number of planned requests.
        sent: number of requests that were sent before the time was up.
        completed: number of whole answers.
        errors: number of each error.
        seconds: from the first request to the last answer.
        prompt_tokens, output_tokens: number of tokens of the whole answers.
        ttft: seconds to the first text.
        inter_token: seconds from a part of an answer to the next, over all answers.
        latency: seconds to the end.
        good: number of whole answers that meet the limits.
    """

    rate: float
    planned: int
    sent: int
    completed: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    ttft: Spread
    inter_token: Spread
    latency: Spread
    good: int

    @property
    def request_rate(self) -> float:
        """Return whole answers a second."""
        return self.completed / self.seconds if self.seconds else 0.0

    @property
    def output_rate(self) -> float:
        """Return output tokens a second."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def goodput(self) -> float:
        """Return whole answers a second that meet the limits."""
        return self.good / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON data; values that were not measured are null, as is an infinite rate."""
        body = asdict(self) | {
            "request_rate": self.request_rate,
            "output_rate": self.output_rate,
            "goodput": self.goodput,
        }
        return _finite(body)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summarise(rate: float, planned: int, answers: Sequence[Answer], start: float, limits: Limits) -> RateReport:
    """Summarise the answers of one rate, whose first request was due at `start`."""
    whole = [answer for answer in answers if answer.error is None]
    return RateReport(
        rate=rate,
        planned=planned,
        sent=len(answers),
        completed=len(whole),
        errors=dict(Counter(answer.error for answer in answers if answer.error is not None).most_common()),
        seconds=max((answer.ended for answer in answers), default=start) - start,
        prompt_tokens=sum(answer.prompt_tokens for answer in whole),
        output_tokens=sum(answer.output_tokens for answer in whole),
        ttft=Spread.of([answer.ttft for answer in whole]),
        inter_token=Spread.of([gap for answer in whole for gap in answer.gaps]),
        latency=Spread.of([answer.latency for answer in whole]),
        good=sum(limits.met_by(answer) for answer in whole),
    )


def table(reports: Sequence[RateReport], title: str) -> Table:
    """Return a table with one row for each rate; latencies are p50 / p90 / p99 in milliseconds."""
    found = Table(title=title)
    for name in ("rate", "done", "errors", "req/s", "good/s", "tok/s", "TTFT ms", "inter-token ms", "end to end ms"):
        found.add_column(name, justify="right")
    for one in reports:
        found.add_row(
            "all" if math.isinf(one.rate) else f"{one.rate:g}",
            f"{one.completed}/{one.planned}",
            str(one.sent - one.completed),
            f"{one.request_rate:.2f}",
            f"{one.goodput:.2f}",
            f"{one.output_rate:.0f}",
            *(_milliseconds(spread) for spread in (one.ttft, one.inter_token, one.latency)),
        )
    return found


def _milliseconds(spread: Spread) -> str:
    if math.isnan(spread.p50):
        return "-"
    values = [1e3 * value for value in (spread.p50, spread.p90, spread.p99)]
    return " / ".join(f"{value:.0f}" if value >= 99.95 else f"{value:.3g}" for value in values)


def plot(reports: Sequence[RateReport], path: Path, title: str) -> None:
    """Draw latencies against the rate; a run with all requests at once is left out. Needs matplotlib."""
    from matplotlib.figure import Figure

    shown = sorted((one for one in reports if not math.isinf(one.rate)), key=lambda one: one.rate)
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    figure.suptitle(title)
    names = {"ttft": "time to first token", "inter_token": "between tokens", "latency": "end to end"}
    for axes, (name, label) in zip(figure.subplots(1, 3), names.items(), strict=True):
        for level, style in (("p50", "-"), ("p90", "--"), ("p99", ":")):
            values = [1e3 * getattr(getattr(one, name), level) for one in shown]
            axes.plot([one.rate for one in shown], values, style, marker="o", markersize=3, label=level)
        axes.set(title=label, xlabel="requests a second", ylabel="ms")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.savefig(path, dpi=110)
