"""Values that users give, checked by name and made plain Python ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from operator import index
from typing import Any

from jpaged.unicode import check_unicode


def integer(name: str, value: Any, *, low: int, high: int | None = None) -> int:
    """An integer of any library as Python's.

    Raises:
        ValueError: it is a boolean, no integer, or out of range.
    """
    try:
        plain = index(value)
    except TypeError:
        plain = None
    if plain is None or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be an integer")
    if plain < low or (high is not None and plain > high):
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name}={plain} must be {limit}")
    return plain


def number(name: str, value: Any, *, low: float, high: float = math.inf, open_low: bool = False) -> float:
    """A real number of any library as Python's.

    Args:
        open_low: `low` itself is out of range.

    Raises:
        ValueError: it is a boolean, no number, not finite, or out of range.
    """
    try:
        plain = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        plain = math.inf
    if not math.isfinite(plain):
        raise ValueError(f"{name}={value!r} must be a finite number")
    if plain < low or plain > high or (open_low and plain == low):
        if high == math.inf:
            raise ValueError(f"{name}={value} must be at least {low}")
        raise ValueError(f"{name}={value} is outside {'(' if open_low else '['}{low}, {high}]")
    return plain


def boolean(name: str, value: Any) -> None:
    """Raises:
    ValueError: it is neither True nor False.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def several(name: str, values: Iterable[Any] | None) -> tuple[Any, ...]:
    """What any iterable gives; None gives nothing.

    Raises:
        ValueError: it is not iterable.
    """
    if values is None:
        return ()
    if not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r} must be a list")
    return tuple(values)


def texts(name: str, values: Iterable[str] | None) -> tuple[str, ...]:
    """Non-empty texts.

    Raises:
        ValueError: one is empty, no text, or half of one.
    """
    found = several(name, values)
    for text in found:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name}={list(found)} must be non-empty strings, got {text!r}")
        check_unicode(name, text)
    return found
