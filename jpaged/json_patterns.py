"""Writes the regular expressions of JSON schemas, which are ECMAScript's, in Rust's syntax, as llguidance reads it."""

from __future__ import annotations

import re

_PART = re.compile(
    r"""
    \\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}  # a character beyond 16 bits, as two
    | \\u(?:[0-9a-fA-F]{4}|\{[0-9a-fA-F]+\}) | \\x[0-9a-fA-F]{2} | \\c[A-Za-z] | \\[pP]\{[^{}]*\} | \\0(?![0-9])
    | \\. | .
    """,
    re.VERBOSE | re.DOTALL,
)
_REPEAT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_IN_CLASS = re.compile(r"\[\^?+\]?+(?:\\.|[^\\\]])*\]", re.DOTALL)
_KEPT = frozenset("bBAZzGk123456789")
"""Letters and digits whose escapes are left for llguidance to refuse: anchors and references to groups."""
_CLASSES = frozenset("dDwWsSpP")
_NAMED = frozenset("fnrtv")
_SPECIAL = frozenset(r"\^$.*+?()[]{}|/&~-")


def rust_pattern(pattern: str) -> str:
    r"""Return a pattern of ECMAScript in Rust's syntax.

    Escapes that are needless, of any character, and brackets and braces that are literal, mean the character. ``{,3}``
    is ``{0,3}``, as validators in Python have it: in ECMAScript it is a literal or, with its flag ``u``, an error.

    >>> rust_pattern(r"[\-\/\"[&&]\ \<{,3}a{b}")
    '[\\-\\/"\\[\\&\\&] <{0,3}a\\{b}'
    """
    written, at = [], 0
    while at < len(pattern):
        if pattern[at] == "[":
            found = _IN_CLASS.match(pattern, at)
            if found is None and pattern.startswith(("[]", "[^]"), at):  # ECMAScript's classes of nothing and of all
                nothing = pattern.startswith("[]", at)
                written.append(r"[^\s\S]" if nothing else r"[\s\S]")
                at += 2 if nothing else 3
            else:
                at = len(pattern) if found is None else found.end()
                written.append(_rust_class(found[0]) if found else pattern[pattern.rindex("[") :])
            continue
        if pattern[at] == "{":
            repeat = _REPEAT.match(pattern, at)
            if repeat and (repeat[1] or repeat[2]):
                written.append(f"{{{repeat[1] or 0}{repeat[2]}{repeat[3]}}}")
                at = repeat.end()
            else:
                written.append(r"\{")
                at += 1
            continue
        part = _PART.match(pattern, at)
        assert part is not None
        written.append(part[0] if len(part[0]) == 1 else _escape(part[0]))
        at = part.end()
    return "".join(written)


def _rust_class(text: str) -> str:
    """Return a class with its brackets; Rust's have others within, and operators as ``&&``."""
    negated = text.startswith("[^")
    parts = [part[0] for part in _PART.finditer(text[2 if negated else 1 : -1])]
    atoms = [r"\x08" if part == r"\b" else _escape(part) if len(part) > 1 else _literal(part) for part in parts]
    written, at = [], 0
    while at < len(atoms):
        ends = (atoms[at], *atoms[at + 2 : at + 3])
        if len(ends) == 2 and parts[at + 1] == "-" and not any(end[:2] in _SETS for end in ends):
            written.append("-".join(ends))
            at += 3
        else:
            written.append(atoms[at])
            at += 1
    return f"[{'^' if negated else ''}{''.join(written)}]"


_SETS = frozenset("\\" + letter for letter in _CLASSES)


def _escape(part: str) -> str:
    """Return an escape in Rust's syntax."""
    letter = part[1]
    if len(part) == 12:
        return chr(0x10000 + ((int(part[2:6], 16) & 0x3FF) << 10) + (int(part[8:], 16) & 0x3FF))
    if letter == "c" and len(part) == 3:
        return rf"\x{ord(part[2]) % 32:02x}"
    if letter == "0":
        return r"\x00"
    if len(part) > 2 or letter in _CLASSES or letter in _NAMED or letter in _KEPT:
        return part
    return _literal(letter)


def _literal(character: str) -> str:
    return f"\\{character}" if character in _SPECIAL else character
