"""Notes which fields of a request are looked at once it was found valid: one that nobody looks at has no effect."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from jpaged.server.bodies import Body

NOWHERE_TOLD = {
    ("ChatRequest", "modalities"): "text is the only one",
    ("ChatRequest", "parallel_tool_calls"): "there is no call without tools",
    ("ChatRequest", "service_tier"): "there is one",
    ("ImageUrl", "detail"): "auto is the only one",
    ("InputItem", "id"): "what a response said of its item",
    ("InputItem", "status"): "what a response said of its item",
    ("InputPart", "logprobs"): "what a response said of its text",
    ("JsonSchema", "description"): "the model does not see the schema",
    ("JsonSchema", "name"): "the model does not see the schema",
    ("JsonSchema", "strict"): "an answer always follows its schema",
    ("NamedTool", "type"): "function is the only one",
    ("ResponseTool", "type"): "function is the only one",
    ("ResponseToolChoice", "type"): "function is the only one",
    ("ResponsesRequest", "stream_options"): "it has no field that is applied",
    ("TextFormat", "description"): "the model does not see the schema",
    ("TextFormat", "strict"): "an answer always follows its schema",
}
"""Fields whose values mean nothing beside what is done anyway, and why."""


class Reads:
    """Watches all bodies while a test runs."""

    def __init__(self, monkeypatch: Any) -> None:
        self._read: dict[int, tuple[Body, set[str]]] = {}
        look, dump = object.__getattribute__, Body.model_dump

        def noted(body: Body, name: str) -> Any:
            if name in type(body).model_fields:
                self._of(body).add(name)
            return look(body, name)

        def dumped(body: Body, **options: Any) -> dict[str, Any]:
            if not sys._getframe(1).f_globals["__name__"].startswith("jpaged.server.openai.responses"):  # an echo
                self._all(body, set(options.get("exclude") or ()))
            return dump(body, **options)

        monkeypatch.setattr(Body, "__getattribute__", noted, raising=False)
        monkeypatch.setattr(Body, "model_dump", dumped)

    def forget(self) -> None:
        """Begin anew."""
        self._read.clear()

    def _of(self, body: Body) -> set[str]:
        return self._read.setdefault(id(body), (body, set()))[1]

    def _all(self, body: Body, left_out: set[str]) -> None:
        for name in body.model_fields_set - left_out:
            self._of(body).add(name)
            for inner in _bodies(body.__dict__[name]):
                self._all(inner, set())

    def dropped(self, user: str) -> set[str]:
        """The fields of a user's request that were given and that nobody looked at, not even in what it became."""
        found = [body for body, _ in self._read.values() if body.__dict__.get("user") == user]
        roots = [body for body in found if "user" in body.model_fields_set]
        assert roots, f"{user} asked for nothing"
        return {name for root in roots for name in self.unread(root)} - set().union(*map(self._of, roots))

    def unread(self, body: Body, where: str = "") -> Iterator[str]:
        """The fields that were given and that nobody looked at."""
        for name in sorted(body.model_fields_set):
            if (type(body).__name__, name) in NOWHERE_TOLD:
                continue
            if name not in self._of(body):
                yield f"{where}{name}"
            for i, inner in enumerate(_bodies(body.__dict__[name])):
                yield from self.unread(inner, f"{where}{name}.{i}.")


def _bodies(value: Any) -> list[Body]:
    inner = value if isinstance(value, list) else [value]
    return [one for one in inner if isinstance(one, Body)]
