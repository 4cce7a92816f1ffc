"""Rewrites the rules of GBNF, so that as little recursion as possible is left, without a change to what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from jpaged.text.gbnf import Expressions, Gbnf, Node

_MOST_SOLVED = 30
"""Most rules of one circle that are solved for each other; the expressions may grow with the cube."""

_MOST_ROUNDS = 10
"""Most rules, one in another, from whose sides repeats are moved."""

_MOST_STRIPPED = 100
"""Most expressions, one in another, at whose sides a needless repeat is looked for: each takes frames of Python's."""

Bodies = dict[int, Node]


class Rules:
    """The rules that a grammar's root leads to, rewritten.

    1. Alternatives that no text ends are dropped: they would let a text begin that cannot be completed.
    2. Recursion at a rule's end (or beginning, if all of its circle is there) becomes a repeat: ``ws ::= (" " ws)?``.
    3. Of equal repeats in a row, as of blanks that one rule ends with and the next one begins with, one is kept.

    Attributes:
        made: the expressions.
        bodies: each rule's expression.
        root: the rule with which a text begins.

    Raises:
        ValueError: no text ends the root; the message names it.
    """

    def __init__(self, grammar: Gbnf) -> None:
        self.made = grammar.expressions
        self.root = grammar.root
        self.bodies = _ending(grammar)
        _solve(self.made, self.bodies, self.root)
        self._plain_rules = _plain_rules(self.made, self.bodies)
        self._plain: dict[Node, bool] = {}
        if not self.is_plain(self.bodies[self.root]):
            self._share_repeats()

    def recursive(self) -> int:
        """Return a rule that leads back to itself."""
        edges = {rule: self.made.rules_in(body) for rule, body in self.bodies.items()}
        return min(circle[0] for circle in _circles(edges) if len(circle) > 1 or circle[0] in edges[circle[0]])

    def resolved(self, node: Node) -> Node:
        """Return an expression, of a rule its body."""
        while self.made.forms[node][0] == "rule":
            node = self.bodies[self.made.forms[node][1]]
        return node

    def is_plain(self, node: Node) -> bool:
        """Tell whether an expression leads to no recursion."""
        if node not in self._plain:
            for each in self.made.inside(node):
                kind, *rest = self.made.forms[each]
                self._plain[each] = (
                    rest[0] in self._plain_rules
                    if kind == "rule"
                    else all(self._plain[part] for part in self.made.parts(each))
                )
        return self._plain[node]

    def parts_first(self, nodes: Iterable[Node]) -> list[Node]:
        """Return expressions without recursion and all that they lead to, rules resolved, parts first."""
        order: dict[Node, None] = {}
        waiting = [(node, False) for node in nodes]
        while waiting:
            node, visited = waiting.pop()
            if visited:
                order[node] = None
            elif node not in order:
                waiting.append((node, True))
                waiting += [(part, False) for part in map(self.resolved, self.made.parts(node))]
        return list(order)

    def _share_repeats(self) -> None:
        """Move repeats from the sides of rules to their uses, and drop those that stand next to an equal one."""
        for rule, body in self.bodies.items():
            if rule not in self._plain_rules:
                repeats = (node for node in self.made.inside(body) if self._is_spare(self.resolved(node)))
                self.bodies[rule] = self._replaced(body, {node: self.resolved(node) for node in repeats})
        taken: set[tuple[int, int]] = set()  # once a side: a rule that begins with itself would go on
        for _ in range(_MOST_ROUNDS):
            moved: dict[Node, Node] = {}
            for rule, body in list(self.bodies.items()):
                kind, *rest = self.made.forms[body]
                is_open = kind == "seq" and rule != self.root and rule not in self._plain_rules
                parts: tuple[Node, ...] = rest[0] if is_open else ()
                first = len(parts) > 1 and (rule, 0) not in taken and self._is_spare(parts[0])
                last = len(parts) > 1 and (rule, -1) not in taken and self._is_spare(parts[-1])
                if first or last:
                    taken |= {(rule, side) for side, is_taken in ((0, first), (-1, last)) if is_taken}
                    middle = parts[int(first) : len(parts) - int(last)]
                    self.bodies[rule] = self.made.sequence(middle)
                    reference = self.made.rule(rule)
                    around = [*parts[: int(first)], reference, *parts[len(parts) - int(last) :]]
                    moved[reference] = self.made.sequence(around)
            if not moved:
                break
            for rule, body in self.bodies.items():
                self.bodies[rule] = self._replaced(body, moved)
        for rule, body in self.bodies.items():
            self.bodies[rule] = self._shared(body)

    def _replaced(self, body: Node, others: Mapping[Node, Node]) -> Node:
        """Return an expression with others in the place of some in it."""
        kept: dict[Node, Node] = {}
        for node in self.made.inside(body):
            kept[node] = others[node] if node in others else self.made.with_parts(node, kept)
        return kept[body]

    def _is_spare(self, node: Node) -> bool:
        return self._repeated(node) is not None and self.is_plain(node)

    def _repeated(self, node: Node) -> Node | None:
        """Return what an expression repeats any number of times; None if it does not."""
        kind, *rest = self.made.forms[node]
        return rest[0] if kind == "rep" and rest[1:] == [0, None] else None

    def _shared(self, body: Node) -> Node:
        made = self.made
        kept: dict[Node, Node] = {}
        for node in made.inside(body):
            kept[node] = node if self.is_plain(node) else made.with_parts(node, kept)
            kind, *rest = made.forms[kept[node]]
            if kept[node] == node and self.is_plain(node):
                continue
            if kind == "seq":
                parts = list(rest[0])
                for side in (0, -1):
                    parts = self._without_equal(parts, side)
                kept[node] = made.sequence(parts)
            elif kind == "rep" and made.forms[rest[0]][0] == "seq":
                parts, low, high = list(made.forms[rest[0]][1]), rest[1], rest[2]
                if len(parts) > 2 and parts[0] == parts[-1] and self._repeated(parts[0]) is not None:
                    # (ws x ws)* is (ws (x ws)+)?
                    again = made.sequence([parts[0], made.repeat(made.sequence(parts[1:]), max(low, 1), high)])
                    kept[node] = again if low else made.choice([again, made.empty])
        return kept[body]

    def _without_equal(self, parts: list[Node], side: int) -> list[Node]:
        """Return parts without what each repeat makes needless in the next one (side 0) or in the one before."""
        kept: list[Node] = []
        for part in parts if side == 0 else reversed(parts):
            often = self._repeated(kept[-1]) if kept else None
            part = part if often is None else self._stripped(part, kept[-1], side)
            if part != self.made.empty:
                kept.append(part)
        return kept if side == 0 else kept[::-1]

    def _stripped(self, node: Node, often: Node, side: int, levels: int = _MOST_STRIPPED) -> Node:
        """Return an expression without the repeat `often` at a side where the same one stands next to it."""
        made = self.made
        kind, *rest = made.forms[node]
        if node == often:
            return made.empty
        if levels == 0:
            return node
        if kind == "seq" and rest[0]:
            end = self._stripped(rest[0][side], often, side, levels - 1)
            parts = [end, *rest[0][1:]] if side == 0 else [*rest[0][:-1], end]
            shorter = made.sequence(parts)
            return self._stripped(shorter, often, side, levels - 1) if end == made.empty else shorter
        if kind == "alt":
            return made.choice(self._stripped(part, often, side, levels - 1) for part in rest[0])
        if kind == "rep":
            inner = made.forms[rest[0]]
            again = inner[0] == "seq" and inner[1] and inner[1][-1 - side] == often
            if again or rest[2] == 1:
                return made.repeat(self._stripped(rest[0], often, side, levels - 1), *rest[1:])
        return node


def _reached(made: Expressions, bodies: Mapping[int, Node], root: int) -> Bodies:
    """Return the rules to which the root leads."""
    seen, waiting = {root: bodies[root]}, [root]
    while waiting:
        for rule in made.rules_in(bodies[waiting.pop()]):
            if rule not in seen:
                seen[rule] = bodies[rule]
                waiting.append(rule)
    return seen


def _ending(grammar: Gbnf) -> Bodies:
    """Return the bodies of the rules that are reached, without alternatives that no text ends.

    Raises:
        ValueError: no text ends the root.
    """
    made = grammar.expressions
    bodies = _reached(made, dict(enumerate(grammar.bodies)), grammar.root)
    nodes = sorted({node for body in bodies.values() for node in made.inside(body)})
    parents: dict[Node, list[Node]] = {}
    missing: dict[Node, int] = {}
    done: set[Node] = set()
    waiting: list[Node] = []
    for node in nodes:
        kind, *rest = made.forms[node]
        parts = (bodies[rest[0]],) if kind == "rule" else made.parts(node)
        for part in parts:
            parents.setdefault(part, []).append(node)
        missing[node] = len(parts) if kind == "seq" else 0 if kind == "set" or (kind == "rep" and rest[1] == 0) else 1
        if missing[node] == 0:
            done.add(node)
            waiting.append(node)
    while waiting:
        for parent in parents.get(waiting.pop(), ()):
            missing[parent] -= 1
            if missing[parent] == 0 and parent not in done:
                done.add(parent)
                waiting.append(parent)
    if bodies[grammar.root] not in done:
        raise ValueError(f"{grammar.place(grammar.root)}: no text ends it, each alternative goes on without an end")
    kept: dict[Node, Node] = {}
    for node in nodes:
        kept[node] = made.with_parts(node, kept) if node in done else made.nothing
    return _reached(made, {rule: kept[body] for rule, body in bodies.items()}, grammar.root)


def _circles(edges: Mapping[int, Iterable[int]]) -> list[list[int]]:
    """Return the strongly connected components, those that others lead to first (Tarjan's algorithm)."""
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    found: list[list[int]] = []
    placed: set[int] = set()
    open_rules: list[int] = []
    for first in edges:
        path: list[tuple[int, Iterator[int]]] = []
        enter = [first] if first not in number else []
        while enter or path:
            if enter:
                rule = enter.pop()
                number[rule] = low[rule] = len(number)
                open_rules.append(rule)
                path.append((rule, iter(edges[rule])))
            rule, rest = path[-1]
            for other in rest:
                if other not in number:
                    enter.append(other)
                    break
                if other not in placed:
                    low[rule] = min(low[rule], number[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[rule])
                if low[rule] == number[rule]:
                    circle = [open_rules.pop()]
                    while circle[-1] != rule:
                        circle.append(open_rules.pop())
                    found.append(circle)
                    placed.update(circle)
    return found


def _solve(made: Expressions, bodies: Bodies, root: int) -> None:
    """Turn recursion at the end of rules into repeats, and drop the rules that are no longer reached."""
    edges = {rule: made.rules_in(body) for rule, body in bodies.items()}
    for circle in _circles(edges):
        if len(circle) == 1 and circle[0] not in edges[circle[0]]:
            continue
        if not any(_solve_circle(made, bodies, circle, at_end) for at_end in (True, False)):
            for rule in circle:  # where a rule ends with itself, whatever else it holds
                split = _Split(made, bodies[rule], {rule}, at_end=True)
                bodies[rule] = split.joined(made.repeat(split.factors.get(rule, made.nothing), 0, None), split.rest)
    kept = _reached(made, bodies, root)
    bodies.clear()
    bodies.update(kept)


class _Split:
    """An expression as the alternatives `factors[r] r` for rules r, and `rest`.

    Attributes:
        pure: whether neither factors nor rest hold any of the rules.
    """

    def __init__(self, made: Expressions, body: Node, rules: set[int], *, at_end: bool) -> None:
        self._made = made
        self._at_end = at_end
        self.pure = True
        found: dict[Node, tuple[dict[int, Node], Node]] = {}  # of the nodes that hold any of the rules
        for node in made.inside(body):
            kind, *rest = made.forms[node]
            if kind == "rule":
                if rest[0] in rules:
                    found[node] = ({rest[0]: made.empty}, made.nothing)
                continue
            holding = [part for part in made.parts(node) if part in found]
            if not holding:
                continue
            if kind == "alt":
                factors: dict[int, Node] = {}
                for part in holding:
                    self._add(factors, found[part][0])
                others = (found[part][1] if part in found else part for part in rest[0])
                found[node] = factors, made.choice(others)
            elif kind == "rep" and rest[1:] == [0, 1]:
                factors, other = found[rest[0]]
                found[node] = factors, made.choice([other, made.empty])
            elif kind == "seq" and rest[0][-1 if at_end else 0] in found:
                before, last = (rest[0][:-1], rest[0][-1]) if at_end else (rest[0][1:], rest[0][0])
                self.pure = self.pure and len(holding) == 1
                prefix = made.sequence(before)
                factors, other = found[last]
                found[node] = {r: self.joined(prefix, f) for r, f in factors.items()}, self.joined(prefix, other)
            else:
                self.pure = False
                found[node] = {}, node
        self.factors, self.rest = found.get(body, ({}, body))

    def _add(self, factors: dict[int, Node], more: Mapping[int, Node]) -> None:
        for rule, factor in more.items():
            factors[rule] = self._made.choice([factors.get(rule, self._made.nothing), factor])

    def joined(self, outer: Node, inner: Node) -> Node:
        """Return `outer` with `inner` next to the side on which the rules are."""
        return self._made.sequence([outer, inner] if self._at_end else [inner, outer])

    def insert(self, rule: int, other: _Split) -> None:
        """Put the expression of a rule in its place."""
        if rule in self.factors:
            factor = self.factors.pop(rule)
            self._add(self.factors, {r: self.joined(factor, f) for r, f in other.factors.items()})
            self.rest = self._made.choice([self.rest, self.joined(factor, other.rest)])

    def repeat(self, rule: int) -> None:
        """Solve for a rule itself: ``r = a r | b`` is ``a* b`` (Arden's lemma)."""
        if rule in self.factors:
            often = self._made.repeat(self.factors.pop(rule), 0, None)
            self.factors = {r: self.joined(often, f) for r, f in self.factors.items()}
            self.rest = self.joined(often, self.rest)


def _solve_circle(made: Expressions, bodies: Bodies, circle: list[int], at_end: bool) -> bool:
    """Solve rules that refer to one another at one side only; tell whether they do."""
    if len(circle) > _MOST_SOLVED:
        return False
    split = {rule: _Split(made, bodies[rule], set(circle), at_end=at_end) for rule in circle}
    if not all(each.pure for each in split.values()):
        return False
    for rule in circle:
        split[rule].repeat(rule)
        for other in circle:
            if other != rule:
                split[other].insert(rule, split[rule])
    bodies.update({rule: each.rest for rule, each in split.items()})
    return True


def _plain_rules(made: Expressions, bodies: Bodies) -> set[int]:
    """Return the rules that lead to no recursion."""
    edges = {rule: made.rules_in(body) for rule, body in bodies.items()}
    plain: set[int] = set()
    for circle in _circles(edges):
        if len(circle) == 1 and edges[circle[0]] <= plain:
            plain.add(circle[0])
    return plain
