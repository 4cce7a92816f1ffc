"""Rewrites grammars for llguidance: GBNF as Lark, and the classes of regular expressions as ASCII.

JSON Schema and most users mean ASCII by ``\\d``, ``\\w`` and ``\\s``, which llguidance reads as Unicode's.
"""

from __future__ import annotations

import re

from jpaged.short_values import shortened
from jpaged.text.gbnf import read_gbnf
from jpaged.text.gbnf_lark import lark_from_gbnf


def lark_of(grammar: str) -> str:
    """Return a GBNF grammar in the Lark that llguidance reads.

    Raises:
        ValueError: it is not well-formed; the message names the rule and the place.
    """
    try:
        return lark_from_gbnf(read_gbnf(grammar))
    except ValueError as error:
        raise ValueError(f"grammar={shortened(repr(grammar))} cannot be read as GBNF: {error}") from error


_CLASSES = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t\n\x0B\x0C\r\x20",
}
_CLASS = re.compile(r"\\(.)", re.DOTALL)
# Both patterns take linear time on any text: a client may send megabytes. No two quantifiers meet, and what is not
# closed is matched to the end of its line, so that the search does not begin anew within it.
_FLAGS = re.compile(r"\\.|\(\?(?P<flags>[A-Za-z-]*)[:)]", re.DOTALL)
_LARK_PARTS = re.compile(
    r"""
    "(?:\\.|[^"\\\n])*"?                 # a text
    | (?://|\#)[^\n]*                    # a comment
    | /(?P<regex>(?:\\.|[^/\\\n])+)(?P<end>/?)  # a regular expression
    """,
    re.VERBOSE,
)


def ascii_classes(regex: str) -> str:
    r"""Return a regex of Rust's syntax whose `\d`, `\w`, `\s` and their negations mean ASCII.

    A regex that sets or clears the flag `u` anywhere defines their meaning itself, and is returned unchanged.

    >>> ascii_classes(r"[\w.]+@\d")
    '[[0-9A-Za-z_].]+@[0-9]'
    >>> ascii_classes(r"(?u)\d")
    '(?u)\\d'
    """
    if any("u" in (match["flags"] or "") for match in _FLAGS.finditer(regex)):
        return regex
    return _CLASS.sub(_ascii, regex)


def ascii_classes_in_lark(grammar: str) -> str:
    """Return a Lark grammar with `ascii_classes` of each of its regular expressions."""
    return _LARK_PARTS.sub(
        lambda match: f"/{ascii_classes(match['regex'])}/" if match["end"] else match[0],
        grammar,
    )


def _ascii(escape: re.Match[str]) -> str:
    """Return a class in brackets, which may stand alone and within another, because brackets nest in Rust's syntax."""
    kind = escape[1]
    if kind.lower() not in _CLASSES:
        return escape[0]
    return f"[{'^' if kind.isupper() else ''}{_CLASSES[kind.lower()]}]"
