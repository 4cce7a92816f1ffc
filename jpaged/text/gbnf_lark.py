"""Translates GBNF to llguidance's Lark, which has a lexer, so that no text is lost or won by it.

GBNF's rules are over characters. llguidance reads terminals first, each as long as the text allows, and parses those
that were found. So a grammar without recursion, once its rules are rewritten, becomes one terminal, a regular
expression. Else the longest expressions without recursion become terminals; those where the longest match could differ
from another reading are cut into their parts, down to single characters, until there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from jpaged.text.gbnf import Gbnf, Node, Ranges
from jpaged.text.gbnf_lexer import Lexer, Places
from jpaged.text.gbnf_rules import Rules

_MOST_OPENED = 8
"""Most levels of rules and sequences that are opened in search of a repeat's alternatives without recursion."""

Symbol = tuple[bool, Node]
"""Whether it is a terminal, and its expression."""


def lark_from_gbnf(grammar: Gbnf) -> str:
    """Return a grammar in llguidance's Lark.

    Raises:
        ValueError: no text ends it, or its terminals are too long to be compared; the message names the rule.
    """
    rules = Rules(grammar)
    root = rules.resolved(rules.made.rule(rules.root))
    if rules.is_plain(root):
        return _written({}, [root], rules, f"start: {_name(True, root)}")
    place = grammar.place(rules.recursive())
    try:
        parser = _parser(rules)
    except OverflowError as error:
        raise ValueError(f"{place}: it is recursive, and what it refers to has too many forms to be read") from error
    terminals = [node for parts in parser.productions.values() for is_terminal, node in parts if is_terminal]
    return _written(parser.productions, terminals, rules, f"start: {_name(False, parser.root)}")


def _parser(rules: Rules) -> _Parser:
    """Return rules whose terminals the longest match cannot misread.

    Raises:
        OverflowError: they have too many places.
    """
    lexer = Lexer(rules)
    _Repeats(rules, lexer)
    cut: set[Node] = set()
    while True:
        parser = _Parser(rules, lexer, cut)
        found = lexer.conflicts(parser.places())
        if not found:
            return parser
        cut |= found


class _Repeats:
    """Writes ``(text | tag)*`` as ``text* (tag text*)*`` where a text may go on as the next one.

    The texts are read as one terminal then, while two next to each other could only be read by single characters.
    """

    def __init__(self, rules: Rules, lexer: Lexer) -> None:
        self._rules = rules
        self._lexer = lexer
        self._divided: dict[int, list[Node]] = {}  # alternatives of rules, those with recursion as a rule of their own
        waiting = list(rules.bodies)
        while waiting:
            known = len(rules.bodies)
            for rule in waiting:
                rules.bodies[rule] = self._parted(rules.bodies[rule])
            waiting = list(rules.bodies)[known:]

    def _parted(self, body: Node) -> Node:
        made, is_plain = self._rules.made, self._rules.is_plain
        kept: dict[Node, Node] = {}
        for node in made.inside(body):
            kept[node] = made.with_parts(node, kept)
            kind, *rest = made.forms[kept[node]]
            if kind != "rep" or rest[2] is not None or rest[1] > 1 or is_plain(kept[node]):
                continue
            alternatives = self._alternatives(rest[0], _MOST_OPENED)
            plain = self._rules.resolved(made.choice(part for part in alternatives if is_plain(part)))
            if plain != made.nothing and self._lexer.runs_on(plain):
                often = made.repeat(plain, 0, None)
                other = made.sequence([made.choice(part for part in alternatives if not is_plain(part)), often])
                first = often if rest[1] == 0 else made.choice([made.repeat(plain, 1, None), other])
                kept[node] = made.sequence([first, made.repeat(other, 0, None)])
        return kept[body]

    def _alternatives(self, node: Node, levels: int) -> list[Node]:
        """Return what an expression is one of, opened so far that those without recursion are found."""
        made, is_plain = self._rules.made, self._rules.is_plain
        kind, *rest = made.forms[node]
        if is_plain(node) or levels == 0:
            return [node]
        if kind == "alt":
            return [each for part in rest[0] for each in self._alternatives(part, levels - 1)]
        opened: list[Node] = []
        if kind == "rule":
            opened = self._divide(rest[0], levels)
        elif kind == "seq" and sum(not is_plain(part) for part in rest[0]) == 1:
            at = next(number for number, part in enumerate(rest[0]) if not is_plain(part))
            inner = self._alternatives(rest[0][at], levels - 1)
            if made.empty not in inner:  # "(" x? ")" is better read as one thing
                opened = [made.sequence([*rest[0][:at], each, *rest[0][at + 1 :]]) for each in inner]
        return opened if any(is_plain(each) for each in opened) else [node]

    def _divide(self, rule: int, levels: int) -> list[Node]:
        """Return a rule's alternatives without recursion, and a new rule of the others."""
        if rule not in self._divided:
            made, bodies = self._rules.made, self._rules.bodies
            self._divided[rule] = [made.rule(rule)]  # within itself
            found = self._alternatives(bodies[rule], levels - 1)
            plain = [each for each in found if self._rules.is_plain(each)]
            if plain:
                other = max(bodies) + 1
                bodies[other] = made.choice(each for each in found if each not in plain)
                found = [*plain, made.rule(other)]
            self._divided[rule] = found
        return self._divided[rule]


class _Parser:
    """The rules that are left for llguidance's parser.

    Attributes:
        root: the expression with which a text begins.
        productions: of each expression that is no terminal, its parts.
    """

    def __init__(self, rules: Rules, lexer: Lexer, cut: set[Node]) -> None:
        self._rules = rules
        self._lexer = lexer
        self.root = rules.resolved(rules.made.rule(rules.root))
        self.productions: dict[Node, list[Symbol]] = {}
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            if node not in self.productions:
                parts = map(rules.resolved, self._joined_parts(node, cut))
                self.productions[node] = [(rules.is_plain(part) and part not in cut, part) for part in parts]
                waiting += [part for is_terminal, part in self.productions[node] if not is_terminal]

    def _joined_parts(self, node: Node, cut: set[Node]) -> list[Node]:
        """Return an expression's parts, those joined that may be one terminal."""
        made = self._rules.made
        kind, parts = made.forms[node][0], list(made.parts(node))
        joins = self._rules.is_plain
        if node in cut:  # what is left to join is the texts in it
            if kind == "alt" or all(made.forms[part][0] == "set" for part in parts):
                return parts
            joins = self._is_set
        if kind == "alt":
            kept = [part for part in parts if not joins(part)]
            plain = made.choice(part for part in parts if joins(part))
            return kept if plain == made.nothing else [plain, *kept]
        if kind == "seq":
            runs = groupby(parts, joins)
            return [part for joined, run in runs for part in ([made.sequence(run)] if joined else run)]
        return parts

    def _is_set(self, node: Node) -> bool:
        return self._rules.made.forms[node][0] == "set"

    def places(self) -> Places:
        """Return where terminals stand: their places are numbered in the order of the productions."""
        terminals = [part for symbols in self.productions.values() for is_terminal, part in symbols if is_terminal]
        following = [0] * len(terminals)
        first = dict.fromkeys(self.productions, 0)  # places with which each expression begins
        after = dict.fromkeys(self.productions, 0)  # those that come after it
        empty = dict.fromkeys(self.productions, False)
        changed = True
        while changed:
            changed = False
            place = len(terminals)
            for node, symbols in reversed(self.productions.items()):
                kind, *rest = self._rules.made.forms[node]
                self._lexer.spend(len(symbols))
                begin, may_miss = 0, kind == "seq"
                for is_terminal, part in reversed(symbols):
                    then = after[node]
                    if kind == "seq":
                        then = begin | (then if may_miss else 0)
                    elif kind == "rep" and rest[2] != 1:
                        then |= first[node]
                    if is_terminal:
                        place -= 1
                        following[place] = then
                        its_first, its_empty = 1 << place, self._lexer.shape(part).empty
                    else:
                        its_first, its_empty = first[part], empty[part]
                        changed = changed or after[part] | then != after[part]
                        after[part] |= then
                    if kind == "seq":
                        begin = its_first | (begin if its_empty else 0)
                        may_miss = may_miss and its_empty
                    else:
                        begin |= its_first
                        may_miss = may_miss or its_empty or (kind == "rep" and rest[1] == 0)
                changed = changed or (begin, may_miss) != (first[node], empty[node])
                first[node], empty[node] = begin, may_miss
        return Places(terminals, first[self.root], following)


def _written(productions: Mapping[Node, list[Symbol]], terminals: Iterable[Node], rules: Rules, start: str) -> str:
    """Return the rules and terminals in Lark's syntax."""
    made = rules.made
    lines = [start]
    for node, symbols in productions.items():
        names = [_name(is_terminal, part) for is_terminal, part in symbols]
        lines.append(f"{_name(False, node)}: {_joined(made.forms[node], names)}")
    for node in rules.parts_first(terminals):
        if made.forms[node][0] == "set":
            lines.append(f"{_name(True, node)}: /{_class(made.forms[node][1])}/")
        else:
            names = [_name(True, rules.resolved(part)) for part in made.parts(node)]
            lines.append(f"{_name(True, node)}: {_joined(made.forms[node], names)}")
    return "\n".join(lines)


def _name(is_terminal: bool, node: Node) -> str:
    return f"{'T' if is_terminal else 'n'}{node}"


def _joined(form: tuple, parts: list[str]) -> str:
    kind, *rest = form
    if kind != "rep":
        return (" " if kind == "seq" else " | ").join(parts) or '""'
    _, low, high = rest
    return f"{parts[0]}{{{low},{'' if high is None else high}}}"


def _class(ranges: Ranges) -> str:
    """Return a class of Rust's regular expressions."""
    inner = "".join(_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}" for low, high in ranges)
    return f"[{inner}]"


def _escaped(code: int) -> str:
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{code:02X}" if code < 0x100 else f"\\x{{{code:X}}}"
