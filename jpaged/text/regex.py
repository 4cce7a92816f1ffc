r"""The classes `\d`, `\w` and `\s` of a regular expression, made ASCII for an engine that reads them as Unicode's."""

from __future__ import annotations

import re

_CLASSES = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t\n\x0B\x0C\r\x20",
}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_FLAG_U = re.compile(r"\\.|(?P<flag>\(\?[A-Za-z]*-?[A-Za-z]*u[A-Za-z]*(-[A-Za-z]+)?[:)])", re.DOTALL)
_LARK_PARTS = re.compile(
    r"""
    "(?:\\.|[^"\\\n])*"                  # a text
    | (?://|\#)[^\n]*                    # a comment
    | /(?P<regex>(?:\\.|[^/\\\n])+)/     # a regular expression
    """,
    re.VERBOSE,
)


def ascii_classes(regex: str) -> str:
    r"""Return a regex of Rust's syntax whose `\d`, `\w`, `\s` and their negations mean ASCII.

    One that sets or clears the flag `u` anywhere says itself what they mean, and is returned as it is.

    >>> ascii_classes(r"[\w.]+@\d")
    '[[0-9A-Za-z_].]+@[0-9]'
    >>> ascii_classes(r"(?u)\d")
    '(?u)\\d'
    """
    if any(match["flag"] for match in _FLAG_U.finditer(regex)):
        return regex
    return _ESCAPE.sub(_ascii, regex)


def ascii_classes_in_lark(grammar: str) -> str:
    """Return a Lark grammar with `ascii_classes` of each of its regular expressions."""
    return _LARK_PARTS.sub(
        lambda match: match[0] if match["regex"] is None else f"/{ascii_classes(match['regex'])}/", grammar
    )


def _ascii(escape: re.Match[str]) -> str:
    """Return a class in brackets, which may stand alone and within another, because brackets nest in Rust's syntax."""
    kind = escape[1]
    if kind.lower() not in _CLASSES:
        return escape[0]
    return f"[{'^' if kind.isupper() else ''}{_CLASSES[kind.lower()]}]"
