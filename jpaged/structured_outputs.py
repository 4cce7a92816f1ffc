"""What shape a request's text must have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jpaged.checks import boolean, texts


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The text follows exactly one of these, to its end unless max_tokens cuts it off.

    Attributes:
        json: a JSON schema: a mapping, its text, or a class with `model_json_schema()`, as pydantic's have.
        regex: a regular expression (Rust's syntax) that the whole text matches.
        choice: texts of which the output is one.
        grammar: a context-free grammar in Lark's syntax, as llguidance reads it.
        json_object: any JSON object.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        boolean("json_object", self.json_object)
        given = [f.name for f in fields(self) if self._given(f.name)]
        if len(given) != 1:
            raise ValueError(f"structured_outputs takes exactly one of its arguments, got {given}")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{name}={value!r} must be a non-empty string")
        if self.choice is not None:
            choice = () if isinstance(self.choice, str) else texts("choice", self.choice)
            if not choice:
                raise ValueError(f"choice={self.choice!r} must be a list of non-empty strings")
            object.__setattr__(self, "choice", choice)
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))

    def _given(self, name: str) -> bool:
        return getattr(self, name) is not None and getattr(self, name) is not False

    @property
    def kind(self) -> str:
        """The name of the one that is given."""
        return next(f.name for f in fields(self) if self._given(f.name))


def _schema(value: Any) -> dict[str, Any]:
    if hasattr(value, "model_json_schema"):
        return value.model_json_schema()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"json={value!r} is not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"json={value!r} must be a schema: a mapping, its JSON text, or a pydantic class")
    try:
        json.dumps(dict(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"json={value!r} is not JSON: {error}") from error
    return dict(value)
