"""The forms of the numbers that `LLM.get_metrics` gives, as vLLM's reader of metrics has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Metric:
    """What all metrics have.

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
    """A number as it is now."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """How often values came, by size.

    Attributes:
        count: number of values.
        sum: sum of all values.
        buckets: number of values that were at most each bound; the bounds are texts, the last is "+Inf".
    """

    count: int
    sum: float
    buckets: Mapping[str, int]
