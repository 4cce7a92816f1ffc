"""Reads grammars in GBNF, llama.cpp's syntax, into expressions over characters.

The syntax is that of llama.cpp's parser (`src/llama-grammar.cpp`): a rule ends with its line unless a parenthesis is
open or a `|` went before, `.` is any character, and of two rules of one name the last counts. Beyond llama.cpp, names
may contain `_` (its guide says so, its parser does not), and nothing may be repeated (`""*`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

MOST_REPEATS = 100_000
"""Most times that a grammar may ask for; the compiler looks ahead through a text that is fixed, however long."""
MOST_NESTED = 500
"""Most parentheses in one another; the time to take recursion out of them grows with the square."""
LAST_CHARACTER = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)

Ranges = tuple[tuple[int, int], ...]
"""Characters by their code points, as ranges from first to last, in order and apart."""

Node = int
"""Number of an expression in `Expressions`; the parts of an expression, rules apart, have smaller numbers."""

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t]+|\#[^\r\n]*)
    | (?P<line>\r\n?|\n)
    | (?P<name>[A-Za-z0-9_-]+)
    | "(?P<text>(?:[^"\\]|\\.)*+)"
    | \[(?P<inverted>\^?)(?P<class>(?:[^\]\\]|\\.)*+)\]
    | (?P<mark>[.()|*+?]|::=)
    | \{[ \t\r\n]*(?P<low>\d+)[ \t\r\n]*(?:(?P<comma>,)[ \t\r\n]*(?P<high>\d*)[ \t\r\n]*)?\}
    | (?P<odd>["\[{]|!?<|.)
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_CHARACTER = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", **{letter: letter for letter in '\\"[]-^'}}
_ODD = {
    '"': "the text that begins here has no closing quote",
    "[": "the characters that begin here have no closing ]",
    "{": "a repeat is {n}, {n,} or {n,m}",
    "<": "tokens (<...>) cannot be followed in GBNF; a grammar in Lark's syntax can name them",
    "!<": "tokens (!<...>) cannot be followed in GBNF; a grammar in Lark's syntax can name them",
}


class Expressions:
    """Numbers expressions: equal ones have one number, and parts come before what they are part of.

    The forms are ``("set", ranges)``, ``("seq", nodes)``, ``("alt", nodes)``, ``("rep", node, low, high or None)`` and
    ``("rule", index)``. The empty text is a sequence of nothing, and what no text fits a choice of nothing.
    """

    def __init__(self) -> None:
        self.forms: list[tuple] = []
        self._numbers: dict[tuple, Node] = {}
        self.empty = self._number(("seq", ()))
        self.nothing = self._number(("alt", ()))

    def _number(self, form: tuple) -> Node:
        number = self._numbers.setdefault(form, len(self.forms))
        if number == len(self.forms):
            self.forms.append(form)
        return number

    def characters(self, ranges: Ranges) -> Node:
        return self._number(("set", ranges)) if ranges else self.nothing

    def rule(self, index: int) -> Node:
        return self._number(("rule", index))

    def sequence(self, parts: Iterable[Node]) -> Node:
        """Return the sequence of some expressions, of which those that are sequences are opened."""
        flat: list[Node] = []
        for part in parts:
            kind, *rest = self.forms[part]
            flat += rest[0] if kind == "seq" else [part]
        kept = tuple(flat)
        if self.nothing in kept:
            return self.nothing
        return kept[0] if len(kept) == 1 else self._number(("seq", kept))

    def choice(self, parts: Iterable[Node]) -> Node:
        kept = tuple(dict.fromkeys(part for part in parts if part != self.nothing))
        return kept[0] if len(kept) == 1 else self._number(("alt", kept))

    def repeat(self, part: Node, low: int, high: int | None) -> Node:
        if part in (self.empty, self.nothing):
            return self.empty if low == 0 or part == self.empty else self.nothing
        if high == 0 or (low, high) == (1, 1):
            return self.empty if high == 0 else part
        kind, *rest = self.forms[part]
        if kind == "rep" and max(low, rest[1]) <= 1 and {high, rest[2]} <= {1, None}:  # as ("a"?)*
            return self._number(("rep", rest[0], low * rest[1], 1 if high == rest[2] == 1 else None))
        return self._number(("rep", part, low, high))

    def parts(self, node: Node) -> tuple[Node, ...]:
        """Return the expressions of which one is made; of a rule none."""
        kind, *rest = self.forms[node]
        if kind in ("seq", "alt"):
            return rest[0]
        return (rest[0],) if kind == "rep" else ()

    def inside(self, node: Node) -> list[Node]:
        """Return an expression and all within it, parts first, without the bodies of rules."""
        seen, waiting = {node}, [node]
        while waiting:
            new = set(self.parts(waiting.pop())) - seen
            seen |= new
            waiting += new
        return sorted(seen)

    def rules_in(self, node: Node) -> set[int]:
        return {self.forms[each][1] for each in self.inside(node) if self.forms[each][0] == "rule"}

    def with_parts(self, node: Node, parts: Mapping[Node, Node]) -> Node:
        """Return an expression with other parts."""
        kind, *rest = self.forms[node]
        if kind == "seq":
            return self.sequence(parts[part] for part in rest[0])
        if kind == "alt":
            return self.choice(parts[part] for part in rest[0])
        return self.repeat(parts[rest[0]], *rest[1:]) if kind == "rep" else node


@dataclass
class Gbnf:
    """A grammar that was read.

    Attributes:
        names: of the rules.
        lines: where each rule begins, from 1.
        bodies: each rule's expression.
        root: index of the rule ``root``.
    """

    expressions: Expressions = field(default_factory=Expressions)
    names: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    bodies: list[Node] = field(default_factory=list)
    root: int = -1

    def place(self, rule: int) -> str:
        """Return a rule's name and line for an error."""
        return f"rule {self.names[rule]!r}, line {self.lines[rule]}"


def read_gbnf(text: str) -> Gbnf:
    """Return the rules of a grammar.

    Raises:
        ValueError: it is not well-formed, or a rule is missing; the message names the rule, line and column.
    """
    return _Reader(text).read()


class _Group:
    """An open parenthesis, or the rule itself: what was read of it."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.alternatives: list[Node] = []
        self.sequence: list[Node] = []

    def close(self, made: Expressions) -> Node:
        return made.choice([*self.alternatives, made.sequence(self.sequence)])


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._rule: str | None = None  # that is being read
        self._line, self._counted = 1, 0  # line of a place, for rules in order
        self._grammar = Gbnf()
        self._made = self._grammar.expressions
        self._indices: dict[str, int] = {}
        self._used: dict[int, tuple[str | None, int]] = {}  # a rule's first use: in which rule, and where

    def read(self) -> Gbnf:
        self._skip(lines=True)
        while self._at < len(self._text):
            self._read_rule()
            self._skip(lines=True)
        grammar, self._rule = self._grammar, None
        for index, (rule, at) in self._used.items():
            if grammar.bodies[index] < 0:
                self._rule = rule
                self._fail(at, f"no rule is named {grammar.names[index]!r}")
        grammar.root = self._indices.get("root", -1)
        if grammar.root < 0:
            raise ValueError("no rule is named 'root', with which a text begins")
        return grammar

    def _fail(self, at: int, reason: str) -> NoReturn:
        line = self._text.count("\n", 0, at) + 1
        column = at - self._text.rfind("\n", 0, at)
        rule = "" if self._rule is None else f"rule {self._rule!r}, "
        raise ValueError(f"{rule}line {line}, column {column}: {reason}")

    def _skip(self, *, lines: bool) -> None:
        """Go past blanks and comments, and ends of lines too if `lines`."""
        while (found := _TOKEN.match(self._text, self._at)) and (
            found.lastgroup == "space" or (lines and found.lastgroup == "line")
        ):
            self._at = found.end()

    def _index(self, name: str) -> int:
        grammar = self._grammar
        index = self._indices.setdefault(name, len(grammar.names))
        if index == len(grammar.names):
            grammar.names.append(name)
            grammar.lines.append(0)
            grammar.bodies.append(-1)
        return index

    def _read_rule(self) -> None:
        begin, self._rule = self._at, None
        found = _TOKEN.match(self._text, begin)
        if found is None or found["name"] is None:
            self._fail(
                begin, "a rule is expected, name ::= ...; a rule goes on in a new line after | or within parentheses"
            )
        self._rule, self._at = found["name"], found.end()
        self._skip(lines=False)
        if not self._text.startswith("::=", self._at):
            self._fail(self._at, "::= is expected after the rule's name")
        self._at += 3
        index = self._index(found["name"])
        self._line += self._text.count("\n", self._counted, begin)
        self._counted = begin
        self._grammar.lines[index] = self._line
        self._grammar.bodies[index] = self._read_body()

    def _read_body(self) -> Node:
        """Return what stands between `::=` and the rule's end."""
        self._skip(lines=True)
        groups = [_Group(self._at)]
        while (found := _TOKEN.match(self._text, self._at)) is not None:
            group, kind, mark = groups[-1], found.lastgroup, found["mark"]
            if kind == "line" and len(groups) == 1:
                break
            if kind == "odd":
                self._fail(self._at, _ODD.get(found["odd"], f"{found['odd']!r} has no meaning here"))
            if mark == "::=":
                self._fail(
                    self._at,
                    'the rule has not ended here: it goes on after ::= or | at the end of a line (an empty text is "")',
                )
            begin, self._at = self._at, found.end()
            if mark == "(":
                if len(groups) > MOST_NESTED:
                    self._fail(begin, f"parentheses nest {len(groups)} deep here, the limit is {MOST_NESTED}")
                groups.append(_Group(begin))
            elif mark == ")":
                if len(groups) == 1:
                    self._fail(begin, "this ) closes nothing")
                groups[-2].sequence.append(groups.pop().close(self._made))
            elif mark == "|":
                group.alternatives.append(self._made.sequence(group.sequence))
                group.sequence = []
            elif mark in ("*", "+", "?") or found["low"] is not None:
                self._repeat(group, found)
            elif kind not in ("space", "line"):
                group.sequence.append(self._symbol(found, begin))
            if mark in ("|", "("):
                self._skip(lines=True)
        if len(groups) > 1:
            self._fail(groups[-1].at, "this ( is not closed")
        return groups[0].close(self._made)

    def _repeat(self, group: _Group, found: re.Match[str]) -> None:
        begin = found.start()
        if not group.sequence:
            self._fail(begin, f"{found[0]} repeats what stands before it, but nothing does")
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(found[0], (0, None))
        if found["low"] is not None:
            low, high = self._count(found["low"], begin), None
            if found["comma"] is None:
                high = low
            elif found["high"]:
                high = self._count(found["high"], begin)
        if high is not None and high < low:
            self._fail(begin, f"{found[0]} asks for at least {low} and at most {high}")
        group.sequence[-1] = self._made.repeat(group.sequence[-1], low, high)

    def _count(self, digits: str, at: int) -> int:
        if len(digits.lstrip("0")) > 9 or int(digits) > MOST_REPEATS:
            self._fail(at, f"a repeat of {digits[:20]} is too long, the limit is {MOST_REPEATS}")
        return int(digits)

    def _symbol(self, found: re.Match[str], begin: int) -> Node:
        """Return the expression of a name, a text, a class or a dot."""
        if found["name"] is not None:
            index = self._index(found["name"])
            self._used.setdefault(index, (self._rule, begin))
            return self._made.rule(index)
        if found["text"] is not None:
            letters = self._characters(found["text"], found.start("text"), whole=True)
            return self._made.sequence(self._made.characters(((code, code),)) for code, _ in letters)
        if found["class"] is not None:
            return self._class(found)
        return self._made.characters(_apart([(0, LAST_CHARACTER)]))

    def _characters(self, text: str, at: int, *, whole: bool) -> list[tuple[int, bool]]:
        """Return a text's code points, and whether each is a hyphen that no backslash precedes.

        Args:
            at: where the text stands in the grammar.
            whole: whether each has to be a character that a text can have; a class may name others.
        """
        found = []
        for each in _CHARACTER.finditer(text):
            digits = each[1] or each[2] or each[3]
            if each[4] is not None and each[4] not in _ESCAPED:
                self._fail(
                    at + each.start(),
                    f'the escape {each[0]!r} is not known; there are \\n, \\r, \\t, \\\\, \\", \\[, \\], \\-, \\x12, '
                    "\\u1234 and \\U12345678",
                )
            code = int(digits, 16) if digits else ord(_ESCAPED[each[4]] if each[4] else each[5])
            if whole and (code > LAST_CHARACTER or _SURROGATES[0] <= code <= _SURROGATES[1]):
                self._fail(
                    at + each.start(),
                    f"{each[0]!r} is no character; one beyond \\uFFFF is written with \\U and eight digits",
                )
            found.append((code, each[5] == "-"))
        return found

    def _class(self, found: re.Match[str]) -> Node:
        """Return the expression of a class; one without characters fits the empty text, as in llama.cpp."""
        letters = self._characters(found["class"], found.start("class"), whole=False)
        if not letters:
            return self._made.empty
        ranges, at = [], 0
        while at < len(letters):
            first = last = letters[at][0]
            at += 1
            if at + 1 < len(letters) and letters[at][1]:
                last = letters[at + 1][0]
                at += 2
            ranges.append((first, last))
        return self._made.characters(_apart(ranges, inverted=bool(found["inverted"])))


def _apart(ranges: Iterable[tuple[int, int]], *, inverted: bool = False) -> Ranges:
    """Return the characters of some ranges, or all others; those whose last comes before their first are empty."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted((first, last) for first, last in ranges if first <= last):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    if not inverted:
        without = [_SURROGATES]
    else:
        without = sorted([*joined, _SURROGATES])
        joined = [(0, LAST_CHARACTER)]
    kept = []
    for first, last in joined:
        for low, high in without:
            if low > last:
                break
            if first < low:
                kept.append((first, low - 1))
            first = max(first, high + 1)
        if first <= min(last, LAST_CHARACTER):
            kept.append((first, min(last, LAST_CHARACTER)))
    return tuple(kept)
