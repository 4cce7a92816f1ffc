"""Rewrites grammars for llguidance: GBNF as Lark, and the classes of regular expressions as ASCII.

JSON Schema and most users mean ASCII by ``\\d``, ``\\w`` and ``\\s``, which llguidance reads as Unicode's.
"""

from __future__ import annotations

import re

_NUMBERED = re.compile(r"\\(?:x(?P<x>[0-9A-Fa-f]{2})|u(?P<u>[0-9A-Fa-f]{4})|U(?P<U>[0-9A-Fa-f]{8})|.)", re.DOTALL)
_SPECIAL = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "-": r"\x2D", "^": r"\x5E", **{c: "\\" + c for c in '"\\[]'}}


def lark_of(grammar: str) -> str:
    """Return a GBNF grammar, whose first rule is ``root``, in Lark's syntax; llguidance converts it.

    Raises:
        ValueError: it is not well-formed.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_NUMBERED.sub(_plain, grammar))
    except Exception as error:  # the converter has no common exception class for its errors
        raise ValueError(f"grammar={grammar!r} cannot be read as GBNF: {error}") from error


def _plain(escape: re.Match[str]) -> str:
    """Return the character that an escape stands for, where the converter writes it in a way that Lark does not
    read."""
    digits = escape["x"] or escape["u"] or escape["U"]
    if digits is None:
        return _SPECIAL[escape[0][1]] if escape[0] in (r"\-", r"\^") else escape[0]
    try:
        character = chr(int(digits, 16))
    except (ValueError, OverflowError):
        return escape[0]
    if character in _SPECIAL:
        return _SPECIAL[character]
    return character if character.isprintable() and not 0xD800 <= ord(character) < 0xE000 else escape[0]


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
