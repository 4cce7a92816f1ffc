"""Reads fields of a ``quantization_config``: each has one type, and a value of another is an error that names it.

A field that is absent or null has its default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def flag(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a field that is true or false.

    Raises:
        ValueError: it is neither.
    """
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)} is neither true nor false")
    return value


def is_size(value: Any) -> bool:
    """Return whether a value is a positive whole number; true and 4.0 are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def inputs_of_group(value: Any, *, may_be_all: bool = False) -> int:
    """Return the number of inputs that share a scale, ``group_size``; 0 = all of them.

    Args:
        may_be_all: whether -1, for all, is allowed.

    Raises:
        ValueError: the value is no such number.
    """
    if is_size(value):
        return int(value)
    if may_be_all and value == -1 and isinstance(value, int):
        return 0
    raise ValueError(f"group_size={shown(value)} is no number of inputs{', or -1 for all of them' * may_be_all}")


def bits_among(value: Any, known: Sequence[int]) -> int:
    """Return a number of bits.

    Raises:
        ValueError: it is none of `known`.
    """
    if not is_size(value) or value not in known:
        raise ValueError(f"bits={shown(value)} is none of {', '.join(map(str, known))}, which are read")
    return int(value)


def texts(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a list of texts, such as modules' names or patterns; empty where there is none.

    Raises:
        ValueError: the field is no such list, or one of its entries begins with "re:" and is no pattern.
    """
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{name}={shown(value)} is no list of texts")
    for one in value:
        if one.startswith("re:"):
            check_pattern(name, one.removeprefix("re:"))
    return tuple(value)


def table(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field that maps texts to anything; empty where there is none.

    Raises:
        ValueError: it is no such table.
    """
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={shown(value)} is no table")
    return value


def own_settings(said: Mapping[str, Any], name: str) -> Mapping[str, Mapping[str, Any]]:
    """Return a field that maps modules' names to settings of their own, as `table` does.

    Raises:
        ValueError: it is no table of tables.
    """
    found = table(said, name)
    for module, own in found.items():
        if own is not None and not isinstance(own, Mapping):
            raise ValueError(f"{name} has {module}={shown(own)}, which is no table")
    return {module: own or {} for module, own in found.items()}


def check_pattern(name: str, pattern: str) -> None:
    """Raise ValueError, naming the field, unless a text is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{name} has the pattern {shown(pattern)}, which is none: {error}") from error


def shown(value: Any) -> str:
    """Return a value for a message, cut where it is long."""
    return repr(value)[:80]
