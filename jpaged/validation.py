"""Checks of the values that users give: each is checked by name and returned as a plain Python value."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from numbers import Real
from operator import index
from typing import Any

from jpaged.short_values import shown

MOST = 2**63 - 1
"""The largest integer that a setting or parameter may be: saved states hold 64 bits of each."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the known one that it is most like, or nothing.

    >>> did_you_mean("max_token", ["max_tokens", "top_k"])
    '; did you mean max_tokens?'
    """
    close = get_close_matches(name[:80], known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def check_unicode(name: str, text: str) -> None:
    """Refuse half a character.

    Raises:
        ValueError: the text holds a lone surrogate, which UTF-8 cannot encode.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}={text!r} is not Unicode text: {error.reason}") from error


def integer(name: str, value: Any, *, low: int, high: int | None = None) -> int:
    """Return `value` as an int; accepts NumPy integers, rejects bool.

    Args:
        high: None = `MOST`.

    Raises:
        ValueError: `value` is a bool, is no integer, or is outside [`low`, `high`]; the message names it `name`.
    """
    try:
        plain = index(value)
    except TypeError:
        plain = None
    if plain is None or isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)} must be an integer")
    if plain < low or plain > (MOST if high is None else high):
        limit = f"at least {low}" if high is None and plain < low else f"in [{low}, {MOST if high is None else high}]"
        raise ValueError(f"{name}={shown(plain)} must be {limit}")
    return plain


def whole(value: Any) -> Any:
    """Return a float of a request that is an integer, as 5.0, as an int; other values unchanged.

    JSON does not tell the two apart, and some clients write all numbers as floats.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def number(name: str, value: Any, *, low: float, high: float = math.inf, open_low: bool = False) -> float:
    """Return `value` as a float; accepts NumPy numbers, rejects bool and what is not finite.

    Args:
        open_low: whether `low` itself is out of range.

    Raises:
        ValueError: `value` is a bool, is no number, is not finite, or is out of range.
    """
    try:
        plain = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        plain = math.inf
    if not math.isfinite(plain):
        raise ValueError(f"{name}={shown(value)} must be a finite number")
    if plain < low or plain > high or (open_low and plain == low):
        if high == math.inf:
            raise ValueError(f"{name}={value} must be {'above' if open_low else 'at least'} {low:g}")
        raise ValueError(f"{name}={value} is outside {'(' if open_low else '['}{low}, {high}]")
    return plain


def boolean(name: str, value: Any) -> None:
    """Refuse a value that is not a bool.

    Raises:
        ValueError: it is neither True nor False.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)} must be True or False")


def one_of(name: str, value: Any, known: Collection[str]) -> None:
    """Refuse a value that is not one of the `known` names.

    Raises:
        ValueError: `value` is none of them, or no string.
    """
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={shown(value)} is not one of {', '.join(known)}")


def several(name: str, values: Iterable[Any] | None) -> tuple[Any, ...]:
    """Return `values` as a tuple; None gives an empty one.

    Raises:
        ValueError: `values` cannot be iterated over.
    """
    if values is None:
        return ()
    if not isinstance(values, Iterable):
        raise ValueError(f"{name}={shown(values)} must be a list")
    return tuple(values)


def texts(name: str, values: Iterable[str] | None) -> tuple[str, ...]:
    """Return `values` as a tuple of non-empty strings; None gives an empty one.

    Raises:
        ValueError: one of them is empty, is no string, or holds half a character.
    """
    found = several(name, values)
    for text in found:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name}={shown(list(found))} must be non-empty strings, got {shown(text)}")
        check_unicode(name, text)
    return found


# ---------------------------------------------------------------- checks of fields

Check = Callable[[str, Any], Any]
"""Takes the name of a setting or parameter and the value that a user gave; returns the value to store, or raises a
ValueError that names both and the limit."""


def real(low: float, high: float = math.inf, *, above: bool = False) -> Check:
    """Take numbers in [`low`, `high`], or those above `low`."""
    return lambda name, value: number(name, value, low=low, high=high, open_low=above)


def switch(name: str, value: Any) -> bool:
    """Take True and False."""
    boolean(name, value)
    return value


def instance(kind: type, named: str) -> Check:
    """Take an object of a class, which the message calls `named`."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"{name}={shown(value)} must be {named}")
        return value

    return check


def optional(check: Check) -> Check:
    """Take None besides."""
    return lambda name, value: None if value is None else check(name, value)
