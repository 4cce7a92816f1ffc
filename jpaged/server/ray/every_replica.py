"""Answers of all replicas at once: their metrics, and who they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray.exceptions import RayActorError
from starlette.types import Message

from jpaged.server.ray.call import REPLICA, Hint

PATIENCE = 5.0
"""Seconds for each replica to begin and end its answer: one with all its places taken takes no question either."""


class Replicas(Protocol):
    """What sends a request to one of several replicas: a deployment's handle, or a test's stand-in."""

    def remote(self, hint: Hint, scope: dict[str, Any], body: bytes) -> Any:
        """Return an asynchronous iterator of lists of ASGI messages, with a method `cancel`."""


@dataclass
class WholeAnswer:
    """What one replica answered, with all of its body."""

    start: Message = field(default_factory=lambda: {"status": 503, "headers": []})
    body: bytes = b""

    @property
    def status(self) -> int:
        """Return the HTTP status."""
        return self.start["status"]


async def ask_all(replicas: Replicas, scope: dict[str, Any]) -> tuple[dict[str, WholeAnswer], bool]:
    """Ask every replica for the same; return the answers by the replicas' names, and whether all have answered.

    Each question avoids those that have answered: the router sends it to one of them only where there is no other. A
    replica that ends meanwhile is left out.
    """
    found: dict[str, WholeAnswer] = {}
    lost = 0
    while lost < 3:
        try:
            name, answer = await asyncio.wait_for(_ask(replicas, Hint(avoid=frozenset(found)), scope), PATIENCE)
        except TimeoutError:
            return found, False
        except RayActorError:
            lost += 1
            continue
        if name in found:
            return found, True
        found[name] = answer
    return found, False


async def _ask(replicas: Replicas, hint: Hint, scope: dict[str, Any]) -> tuple[str, WholeAnswer]:
    outputs = replicas.remote(hint, scope, b"")
    name, answer = "", WholeAnswer()
    try:
        async for messages in outputs:
            for message in messages:
                if message["type"] == REPLICA:
                    name = message["name"]
                elif message["type"] == "http.response.start":
                    answer.start = message
                else:
                    answer.body += message.get("body", b"")
    finally:
        with contextlib.suppress(Exception):
            outputs.cancel()
    return name, answer


def merged_metrics(texts: Mapping[str, str], *, whole: bool) -> bytes:
    """Return metrics in Prometheus' text format, each with the label ``replica``, and how many replicas told theirs.

    Args:
        texts: the metrics of each replica, by its name.
        whole: whether these are all.
    """
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text):
            mine = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            mine.samples += [sample._replace(labels={**sample.labels, "replica": name}) for sample in family.samples]
    told = Metric("jpaged:replicas_told", "Replicas whose metrics these are.", "gauge")
    told.add_sample(told.name, {"all": str(whole).lower()}, len(texts))
    registry = CollectorRegistry()
    registry.register(_Found([told, *families.values()]))
    return generate_latest(registry)


class _Found(Collector):
    """Gives metrics that were collected before."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
