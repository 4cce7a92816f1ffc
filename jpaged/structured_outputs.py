"""Parameters for the shape that a text must have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from jpaged.short_tracebacks import short_init
from jpaged.short_values import shown
from jpaged.validation import boolean, texts
from jpaged.vllm_refusals import refuse_parameters, with_vllms_attributes

MOST_CHOICES = 10_000
"""Most texts of `choice`, and most values of the `enum`s of a schema."""
MOST_CHARACTERS = 2**20
"""Most characters of `regex` and `grammar`: to look through so many holds Python's lock for a quarter of a second."""
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_SHAPES = ("json", "regex", "choice", "grammar", "json_object")


def is_gbnf(grammar: str) -> bool:
    """Tell whether a grammar has a rule as GBNF writes it, ``name ::= ...``."""
    return _GBNF_RULE.search(grammar) is not None


@with_vllms_attributes
@short_init
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one shape, which the text follows to its end unless max_tokens cuts it off.

    Attributes:
        json: a JSON schema: a mapping, its text, or a class with `model_json_schema()`, as pydantic's have.
        regex: a regular expression (Rust's syntax) that the whole text matches. ``\\d``, ``\\w``, ``\\s`` and their
            negations mean ASCII, unless the flag ``u`` is set in it: ``(?u)\\d+`` matches the digits of all scripts. At
            most 1,048,576 characters.
        choice: a list of at most 10,000 texts; the output is one of them.
        grammar: a context-free grammar in Lark's syntax, as llguidance reads it, with regular expressions that mean
            what `regex` does; or in llama.cpp's, GBNF, which has rules ``name ::= ...`` and begins with ``root``. GBNF
            takes the texts that llama.cpp takes (no longest match), and left recursion too, but no tokens (``<...>``)
            and no more than 100,000 repeats of a symbol. At most as many characters as `regex`.
        json_object: True asks for any JSON object.
        disable_any_whitespace: True allows no white space between the parts of JSON.

    Raises:
        TypeError: a parameter exists only in vLLM's class of this name; the message names the alternative.
        ValueError: a value cannot be used; the message names it.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False

    def __new__(cls, **given: Any) -> Self:
        refuse_parameters("StructuredOutputsParams", given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        boolean("json_object", self.json_object)
        boolean("disable_any_whitespace", self.disable_any_whitespace)
        given = [name for name in _SHAPES if self._given(name)]
        if self.disable_any_whitespace and given not in (["json"], ["json_object"]):
            raise ValueError("disable_any_whitespace=True needs json or json_object")
        if len(given) != 1:
            known = ", ".join(_SHAPES)
            raise ValueError(f"StructuredOutputsParams takes exactly one of {known}; it got {given}")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{name}={shown(value)} must be a non-empty string")
            if value is not None and len(value) > MOST_CHARACTERS:
                raise ValueError(f"{name} has {len(value)} characters, the limit is {MOST_CHARACTERS}")
        if self.choice is not None:
            choice = () if isinstance(self.choice, str) else texts("choice", self.choice)
            if not choice:
                raise ValueError(f"choice={shown(self.choice)} must be a list of non-empty strings")
            if len(choice) > MOST_CHOICES:
                raise ValueError(f"choice has {len(choice)} texts, the limit is {MOST_CHOICES}")
            object.__setattr__(self, "choice", choice)
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))

    def _given(self, name: str) -> bool:
        return getattr(self, name) is not None and getattr(self, name) is not False

    @property
    def kind(self) -> str:
        """Return the name of the shape that is given."""
        return next(name for name in _SHAPES if self._given(name))


def _schema(value: Any) -> dict[str, Any]:
    if hasattr(value, "model_json_schema"):
        return value.model_json_schema()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"json={_shown(value)} is not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"json={_shown(value)} must be a schema: a mapping, its JSON text, or a pydantic class")
    try:
        json.dumps(dict(value))
    except (TypeError, ValueError) as error:
        if "int_max_str_digits" in str(error):
            raise ValueError("json has an integer of more digits than Python writes, 4,300 by default") from error
        raise ValueError(f"json={_shown(value)} is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("json is a schema that nests too deep to be written as JSON") from error
    return dict(value)


def _shown(value: Any) -> str:
    """Return the beginning of a value for an error."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
