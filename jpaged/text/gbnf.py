"""Grammars in llama.cpp's notation, GBNF, are made Lark grammars."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\\(?:x(?P<x>[0-9A-Fa-f]{2})|u(?P<u>[0-9A-Fa-f]{4})|U(?P<U>[0-9A-Fa-f]{8})|.)", re.DOTALL)
_SPECIAL = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "-": r"\x2D", "^": r"\x5E", **{c: "\\" + c for c in '"\\[]'}}


def lark_of(grammar: str) -> str:
    """Return a GBNF grammar, whose first rule is ``root``, in Lark's syntax; llguidance converts it.

    Raises:
        ValueError: it is not well-formed.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_ESCAPE.sub(_plain, grammar))
    except Exception as error:  # the converter has no exception of its own for all that can be wrong
        raise ValueError(f"grammar={grammar!r} cannot be read as GBNF: {error}") from error


def _plain(escape: re.Match[str]) -> str:
    """Return the character that a number stands for, which the converter writes in a way that Lark does not read."""
    digits = escape["x"] or escape["u"] or escape["U"]
    if digits is None:
        return escape[0]
    try:
        character = chr(int(digits, 16))
    except (ValueError, OverflowError):
        return escape[0]
    if character in _SPECIAL:
        return _SPECIAL[character]
    return character if character.isprintable() and not 0xD800 <= ord(character) < 0xE000 else escape[0]
