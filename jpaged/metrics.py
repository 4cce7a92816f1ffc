"""Types of the metrics that `LLM.get_metrics` returns, as in vLLM's reader of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Metric:
    """Base class of all metrics.

    Attributes:
        name: begins with ``jpaged:``; vLLM's name follows where vLLM has the metric.
        labels: tell metrics of one name apart.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows."""

    value: float


@dataclass(frozen=True)
class Gauge(Metric):
    """A current value."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """Counts of values, by size.

    Attributes:
        count: number of values.
        sum: sum of all values.
        buckets: number of values that were at most each bound; the bounds are texts, the last is "+Inf".
    """

    count: int
    sum: float
    buckets: Mapping[str, int]
