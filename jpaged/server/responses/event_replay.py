"""What the clients of a response were told of it before the server was killed, and what is new to them afterwards."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_LAST = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""Kinds of events behind which a response has none."""


def kind_of(event: bytes) -> str:
    """Return the kind of a server-sent event, as `streaming.event` writes it."""
    return event[len(b"event: ") : event.index(b"\n")].decode()


def ends(events: Sequence[bytes | None]) -> bool:
    """Tell whether events come to the response's end."""
    return bool(events) and events[-1] is not None and kind_of(events[-1]) in _LAST


def without_false_ends(events: Sequence[bytes], *, ended: bool) -> list[bytes | None]:
    """Return the events with None where one told of an end that was none, as when a server stopped what it went on with
    later. The others keep their places, which are their numbers.

    Args:
        ended: whether the last event may tell of the true end.
    """
    kinds = [kind_of(event) for event in events]
    true: list[bytes | None] = list(events)
    for last, kind in enumerate(kinds):
        if kind not in _LAST or (ended and last == len(kinds) - 1):
            continue
        first = last
        while first and kinds[first - 1].endswith(".done"):  # it closed what was open
            first -= 1
        true[first : last + 1] = [None] * (last + 1 - first)
    return true


def _what(kind: str, fields: dict[str, Any]) -> str:
    """Return what an event tells of: its kind, and the kind of the item that begins or ends."""
    return f"{kind} {fields['item']['type']}" if "item" in fields else kind


@dataclass
class _Part:
    """An event, or the text of several that follow one another.

    Attributes:
        left: characters of the text that have not come again.
    """

    kind: str
    left: int = 0


class ToldBefore:
    """Finds what is new in a response's events when they are made again: text may be cut into other pieces then.

    Where they turn out to be others than they were, all is new from there on.

    Args:
        events: what was told before.
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
                self._parts.append(_Part(_what(kind, fields)))
                continue
            self._num_scores += len(fields.get("logprobs", ()))
            if fields["delta"] and not (self._parts and self._parts[-1].kind == kind):
                self._parts.append(_Part(kind))
            if fields["delta"]:
                self._parts[-1].left += len(fields["delta"])

    def news(self, kind: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        """Return what is new of an event's fields; None where nothing is."""
        if not self._parts and not self._num_scores and not self._owed:
            return fields
        if "delta" not in fields:
            return self._whole(kind, fields)
        text = self._text(kind, fields["delta"])
        told = {**fields, "delta": text}
        if "logprobs" in fields:
            self._owed += self._scores(fields["logprobs"])
        if not text:
            return None
        if "logprobs" in fields:
            told["logprobs"], self._owed = self._owed, []
        return told

    def _whole(self, kind: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        if not self._parts:
            return fields
        if self._parts[0].kind == _what(kind, fields):
            self._parts.popleft()
            return None
        self._parts.clear()
        return fields

    def _text(self, kind: str, text: str) -> str:
        """Return the part of a text that has not come before."""
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
        """Return the log-probabilities that have not come before."""
        known = min(self._num_scores, len(scores))
        self._num_scores -= known
        return scores[known:]
