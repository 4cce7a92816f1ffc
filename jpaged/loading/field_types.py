"""Checks the types of the fields that a model's files have, so that what reads them need not.

A table of `Type` by field says what is read; other fields may have any value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jpaged.short_values import shortened, shown


@dataclass(frozen=True)
class Type:
    """Describes the values that a field may have, by a test and in words."""

    holds: Callable[[Any], bool]
    words: str

    def or_null(self) -> Type:
        """Return the type of a field that may be null, which counts as its absence."""
        return Type(lambda value: value is None or self.holds(value), f"{self.words}, or null")


def list_of(each: Type, words: str) -> Type:
    """Return the type of lists, perhaps empty, of values of one type."""
    return Type(lambda value: isinstance(value, list) and all(map(each.holds, value)), words)


def table_of(each: Type, words: str) -> Type:
    """Return the type of JSON objects, perhaps empty, whose values have one type."""
    return Type(lambda value: isinstance(value, Mapping) and all(map(each.holds, value.values())), words)


def either(*types: Type) -> Type:
    """Return the type of values of any of these types."""
    return Type(lambda value: any(one.holds(value) for one in types), ", or ".join(one.words for one in types))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


INTEGER = Type(_is_whole, "an integer")
WHOLE = Type(lambda value: _is_whole(value) and value >= 0, "a whole number")
POSITIVE = Type(lambda value: _is_whole(value) and value > 0, "a positive whole number")
REAL = Type(_is_real, "a finite number")
ABOVE_ZERO = Type(lambda value: _is_real(value) and value > 0, "a positive number")
FLAG = Type(lambda value: isinstance(value, bool), "true or false")
TEXT = Type(lambda value: isinstance(value, str), "a text")
TABLE = Type(lambda value: isinstance(value, Mapping), "a table")


def check_field(place: object, name: str, value: Any, type_: Type) -> None:
    """Raise ValueError, naming a file and a field, if its value is of another type."""
    if not type_.holds(value):
        raise ValueError(f"{place}: {name}={shortened(shown(value))} must be {type_.words}")


def check_fields(place: object, fields: Mapping[str, Any], types: Mapping[str, Type]) -> None:
    """Raise ValueError, naming a file and a field, if one of `fields` is of another type than `types` says."""
    for name, type_ in types.items():
        if name in fields:
            check_field(place, name, fields[name], type_)
