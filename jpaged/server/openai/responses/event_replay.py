"""Continues the events of a response after a restart: finds those that its clients have not received before."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})
"""Terminal event types."""


def kind_of(event: bytes) -> str:
    """Return the type of a server-sent event, as `streaming.event` writes it."""
    return event[len(b"event: ") : event.index(b"\n")].decode()


def ends(events: Sequence[bytes | None]) -> bool:
    """Tell whether the last event is terminal."""
    return bool(events) and events[-1] is not None and kind_of(events[-1]) in _TERMINAL


def without_false_ends(events: Sequence[bytes], *, ended: bool) -> list[bytes | None]:
    """Return the events with None in the place of each terminal event that was not the end, and of the events that it
    closed: a stopping server ends a response that the restarted server continues. The others keep their numbers.

    Args:
        ended: whether the last event may be the true end.
    """
    kinds = [kind_of(event) for event in events]
    true: list[bytes | None] = list(events)
    for last, kind in enumerate(kinds):
        if kind not in _TERMINAL or (ended and last == len(kinds) - 1):
            continue
        first = last
        while first and kinds[first - 1].endswith(".done"):  # events that closed the open item
            first -= 1
        true[first : last + 1] = [None] * (last + 1 - first)
    return true


def _label(kind: str, fields: dict[str, Any]) -> str:
    """Return an event's type, with the type of the item that begins or ends."""
    return f"{kind} {fields['item']['type']}" if "item" in fields else kind


@dataclass
class _Part:
    """An event, or the text of several consecutive deltas.

    Attributes:
        left: characters of the text that have not been generated again.
    """

    kind: str
    left: int = 0


class EventReplay:
    """Finds the new parts of a response's events when they are generated again, with text cut into other pieces.

    From the first event that differs from the one before the restart, all events are new.

    Args:
        events: the events that were sent before the restart.
    """

    def __init__(self, events: Iterable[bytes | None]) -> None:
        self._parts: deque[_Part] = deque()
        self._num_scores = 0
        self._owed: list[Any] = []
        for event in events:
            if event is None:
                continue
            kind, fields = kind_of(event), json.loads(event[event.index(b"\ndata: ") + len(b"\ndata: ") :])
            if "delta" not in fields:
                self._parts.append(_Part(_label(kind, fields)))
                continue
            self._num_scores += len(fields.get("logprobs", ()))
            if fields["delta"] and not (self._parts and self._parts[-1].kind == kind):
                self._parts.append(_Part(kind))
            if fields["delta"]:
                self._parts[-1].left += len(fields["delta"])

    def unseen(self, kind: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        """Return the new part of an event's fields; None if nothing is new."""
        if not self._parts and not self._num_scores and not self._owed:
            return fields
        if "delta" not in fields:
            return self._whole(kind, fields)
        text = self._text(kind, fields["delta"])
        new = {**fields, "delta": text}
        if "logprobs" in fields:
            self._owed += self._scores(fields["logprobs"])
        if not text:
            return None
        if "logprobs" in fields:
            new["logprobs"], self._owed = self._owed, []
        return new

    def _whole(self, kind: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        if not self._parts:
            return fields
        if self._parts[0].kind == _label(kind, fields):
            self._parts.popleft()
            return None
        self._parts.clear()
        return fields

    def _text(self, kind: str, text: str) -> str:
        """Return the part of a text that is new."""
        if self._parts and self._parts[0].kind == kind:
            known = min(self._parts[0].left, len(text))
            self._parts[0].left -= known
            if not self._parts[0].left:
                self._parts.popleft()
            text = text[known:]
        if text:
            self._parts.clear()
        return text

    def _scores(self, scores: list[Any]) -> list[Any]:
        """Return the log-probabilities that are new."""
        known = min(self._num_scores, len(scores))
        self._num_scores -= known
        return scores[known:]
