"""Asks all replicas the same question and merges their metrics, load and health."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray.exceptions import RayActorError
from starlette.types import Message

from jpaged.integrations.ray.hints import REPLICA, Hint

ANSWER_TIMEOUT = 5.0
"""Seconds for a replica to answer. A replica without a free place does not accept the question either."""


class Replicas(Protocol):
    """Interface to send a request to one of several replicas, such as a deployment's handle."""

    def remote(self, hint: Hint, scope: dict[str, Any], body: bytes) -> Any:
        """Return an asynchronous iterator of lists of ASGI messages, with a method `cancel`."""


@dataclass
class WholeAnswer:
    """A replica's answer with its whole body."""

    start: Message = field(default_factory=lambda: {"status": 503, "headers": []})
    body: bytes = b""

    @property
    def status(self) -> int:
        """Return the HTTP status."""
        return self.start["status"]


@dataclass
class Answers:
    """The replicas' answers to one question.

    Attributes:
        by_name: answers by the replicas' names.
        silent: names of the replicas that accepted the question and did not answer in time.
        whole: whether every replica has answered.
    """

    by_name: dict[str, WholeAnswer] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    whole: bool = False


async def ask_all(replicas: Replicas, scope: dict[str, Any]) -> Answers:
    """Ask every replica the same.

    Each question avoids the replicas already asked: the router sends it to one of them only if there is no other. A
    replica that ends in the meantime is skipped.
    """
    found = Answers()
    lost = 0
    while lost < 3:
        asked = _Question(replicas, Hint(avoid=frozenset({*found.by_name, *found.silent})), scope)
        try:
            await asyncio.wait_for(asked.ask(), ANSWER_TIMEOUT)
        except TimeoutError:
            if not asked.name or asked.name in {*found.by_name, *found.silent}:
                return found
            found.silent.add(asked.name)
            continue
        except RayActorError:
            lost += 1
            continue
        if asked.name in found.by_name:
            found.whole = not found.silent
            return found
        found.by_name[asked.name] = asked.answer
        found.silent.discard(asked.name)
    return found


class _Question:
    """One replica's answer as it comes. The replica's name is known before the answer."""

    def __init__(self, replicas: Replicas, hint: Hint, scope: dict[str, Any]) -> None:
        self.name = ""
        self.answer = WholeAnswer()
        self._outputs = replicas.remote(hint, scope, b"")

    async def ask(self) -> None:
        try:
            async for messages in self._outputs:
                for message in messages:
                    if message["type"] == REPLICA:
                        self.name = message["name"]
                    elif message["type"] == "http.response.start":
                        self.answer.start = message
                    else:
                        self.answer.body += message.get("body", b"")
        finally:
            with contextlib.suppress(Exception):
                self._outputs.cancel()


def merged_metrics(texts: Mapping[str, str], *, whole: bool) -> bytes:
    """Return metrics in Prometheus' text format, each with the label ``replica``, and the number of replicas.

    Args:
        texts: the metrics by the replicas' names.
        whole: whether all replicas are among them.
    """
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text):
            mine = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            mine.samples += [sample._replace(labels={**sample.labels, "replica": name}) for sample in family.samples]
    count = Metric("jpaged:replicas_told", "Replicas that these metrics come from.", "gauge")
    count.add_sample(count.name, {"all": str(whole).lower()}, len(texts))
    registry = CollectorRegistry()
    registry.register(_Found([count, *families.values()]))
    return generate_latest(registry)


def merged_health(answers: Answers) -> tuple[int, dict[str, Any]]:
    """Return the status and body of `/health` for all replicas, with ``ok`` or an error code for each.

    The status is 200 while at least one replica accepts requests.
    """
    states = {name: "ok" if answer.status == 200 else _code(answer) for name, answer in answers.by_name.items()}
    states |= dict.fromkeys(answers.silent, "no_answer")
    well = [name for name, state in states.items() if state == "ok"]
    status = "failed" if not well else "ok" if answers.whole and len(well) == len(states) else "degraded"
    return (200 if well else 503), {"status": status, "replicas": states}


def _code(answer: WholeAnswer) -> str:
    try:
        return json.loads(answer.body)["error"]["code"] or str(answer.status)
    except (ValueError, KeyError, TypeError):
        return str(answer.status)


def merged_load(answers: Answers) -> dict[str, Any]:
    """Return the body of `/v1/load` for all replicas: sums, the mean of the KV usage, and each replica's own load.

    `whole` tells whether every replica has answered.
    """
    own = {name: json.loads(answer.body) for name, answer in answers.by_name.items()}
    names = ("active", "running", "waiting", "swapped", "max_waiting")
    return {
        **{name: sum(load[name] for load in own.values()) for name in names},
        "kv_cache_usage": sum(load["kv_cache_usage"] for load in own.values()) / len(own),
        "draining": all(load["draining"] for load in own.values()),
        "whole": answers.whole,
        "replicas": own,
    }


class _Found(Collector):
    """Exports metrics that were collected before."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
