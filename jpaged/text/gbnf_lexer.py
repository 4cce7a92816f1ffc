"""Finds the terminals that llguidance's lexer, which takes the longest match, would misread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jpaged.text.gbnf import Node, Ranges
from jpaged.text.gbnf_rules import Rules

_MOST_COPIES = 16
"""Most places to which a repeat is written out; a longer one counts as endless where terminals are compared."""
_MOST_STEPS = 2_000_000
"""Most steps of all comparisons of terminals, about two seconds."""


class Places(NamedTuple):
    """Where terminals stand in rules, and what may come next, as bits of those places.

    Attributes:
        terminals: the terminal of each place.
        begin: places with which a text may begin.
        following: for each place those after it.
    """

    terminals: list[Node]
    begin: int
    following: list[int]


@dataclass(frozen=True)
class _Shape:
    """A terminal as an automaton whose states are its characters' places, as bits (Glushkov's construction).

    A repeat of very many counts as endless, so the automaton may accept more than the terminal.

    Attributes:
        sets: at each place the expression of its characters.
        first: places with which a text begins.
        last: those with which one ends.
        after: for each place those that may come next.
        empty: whether the empty text fits.
    """

    sets: list[Node]
    first: int
    last: int
    after: list[int]
    empty: bool


class Lexer:
    """Predicts how llguidance's lexer splits texts into terminals."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._made = rules.made
        self._shapes: dict[Node, _Shape] = {}
        self._meetings: dict[tuple[Node, Node], tuple[int, bool]] = {}
        self._common: dict[tuple[Node, Node], bool] = {}
        self._leads: dict[Node, int] = {}
        self._steps = 0

    def shape(self, terminal: Node) -> _Shape:
        """Return a terminal's automaton."""
        if terminal not in self._shapes:
            self._shapes[terminal] = self._make_shape(terminal)
        return self._shapes[terminal]

    def _make_shape(self, terminal: Node) -> _Shape:
        copies: dict[Node, tuple[list[Node], bool]] = {}
        places: dict[Node, int] = {}
        for node in self._rules.parts_first([terminal]):
            kind, *rest = self._made.forms[node]
            parts, endless = [self._rules.resolved(part) for part in self._made.parts(node)], False
            if kind == "rep":
                endless = rest[2] is None
                times = rest[1] if endless else rest[2]
                if places[parts[0]] * times > _MOST_COPIES:
                    times, endless = 1, True
                parts *= max(times, 1)
            copies[node] = parts, endless
            places[node] = 1 if kind == "set" else sum(places[part] for part in parts)
        self.spend(places[terminal] + places[terminal] ** 2 // 1000)  # each place has as many bits
        sets: list[Node] = []
        after: list[int] = []
        done: list[tuple[int, int, bool]] = []  # first, last, empty
        waiting = [(terminal, False)]
        while waiting:
            node, visited = waiting.pop()
            kind, *rest = self._made.forms[node]
            parts, endless = copies[node]
            if kind == "set":
                done.append((1 << len(sets), 1 << len(sets), False))
                sets.append(node)
                after.append(0)
                continue
            if not visited:
                waiting.append((node, True))
                waiting += [(part, False) for part in reversed(parts)]
                continue
            made = done[len(done) - len(parts) :]
            del done[len(done) - len(parts) :]
            if kind == "alt":
                first = last = 0
                for one in made:
                    first, last = first | one[0], last | one[1]
                done.append((first, last, any(one[2] for one in made)))
                continue
            first, last, empty = 0, 0, True
            for number, one in enumerate(made):
                may_miss = one[2] or (kind == "rep" and number >= rest[1])
                self._link(after, last, one[0])
                first |= one[0] if empty else 0
                last = one[1] | (last if may_miss else 0)
                empty = empty and may_miss
            if endless:
                self._link(after, made[-1][1], made[-1][0])
            done.append((first, last, empty))
        return _Shape(sets, done[0][0], done[0][1], after, done[0][2])

    def _link(self, after: list[int], before: int, then: int) -> None:
        if then:
            for place in self._bits(before):
                after[place] |= then

    def _bits(self, bits: int) -> Iterator[int]:
        while bits:
            self.spend(1)
            yield (bits & -bits).bit_length() - 1
            bits &= bits - 1

    def spend(self, steps: int) -> None:
        """Count the work that is done for a grammar.

        Raises:
            OverflowError: it is too much.
        """
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise OverflowError("too many steps")

    def _meet(self, one: Node, other: Node) -> tuple[int, bool]:
        """Compare two terminals.

        Returns:
            The first bytes, as bits, of characters with which a text of `one` goes on as a beginning of `other`; and
            whether a text fits both. The empty text does not count.
        """
        if (one, other) in self._meetings:
            return self._meetings[one, other]
        a, b = self.shape(one), self.shape(other)
        by_set: dict[Node, int] = {}
        for place, node in enumerate(b.sets):
            by_set[node] = by_set.get(node, 0) | 1 << place
        fitting: dict[Node, int] = {}
        for node in set(a.sets):
            fitting[node] = sum(places for each, places in by_set.items() if self._have_common(node, each))
        reached: dict[int, int] = {}
        waiting: list[tuple[int, int]] = []
        after: dict[int, int] = {}  # of some places of b, those after them

        def reach(places: int, others: int) -> None:
            for place in self._bits(places):
                new = others & fitting[a.sets[place]] & ~reached.get(place, 0)
                if new:
                    reached[place] = reached.get(place, 0) | new
                    waiting.append((place, new))

        reach(a.first, b.first)
        goes_on, both = 0, False
        while waiting:
            place, others = waiting.pop()
            if others not in after:  # as often as there are texts that begin alike
                after[others] = 0
                for each in self._bits(others):
                    after[others] |= b.after[each]
            then = after[others]
            if a.last >> place & 1:
                goes_on |= then
                both = both or bool(others & b.last)
            reach(a.after[place], then)
        self._meetings[one, other] = self._lead(b, goes_on), both
        return self._meetings[one, other]

    def runs_on(self, terminal: Node) -> bool:
        """Tell whether a text of a terminal may go on as the next one of it."""
        shape = self.shape(terminal)
        return bool(self._meet(terminal, terminal)[0] & self._lead(shape, shape.first))

    def _have_common(self, one: Node, other: Node) -> bool:
        """Tell whether two sets have a character in common."""
        if (one, other) not in self._common:
            a, b = self._made.forms[one][1], self._made.forms[other][1]
            i = j = 0
            while i < len(a) and j < len(b) and (a[i][1] < b[j][0] or b[j][1] < a[i][0]):
                self.spend(1)
                i, j = (i + 1, j) if a[i][1] < b[j][0] else (i, j + 1)
            self._common[one, other] = i < len(a) and j < len(b)
        return self._common[one, other]

    def _lead(self, shape: _Shape, places: int) -> int:
        """Return the first bytes, as bits, of the characters at some places."""
        found = 0
        for node in {shape.sets[place] for place in self._bits(places)}:
            if node not in self._leads:
                self._leads[node] = _first_bytes(self._made.forms[node][1])
            found |= self._leads[node]
        return found

    def conflicts(self, places: Places) -> set[Node]:
        """Return the terminals that could take a character which another reading leaves to the next terminal.

        The lexer goes on while any terminal that the parser allows can, by bytes. So where a terminal ends and another
        one follows, no terminal that is allowed at the same place may go on with a byte that the next one begins with.
        Which are allowed together is found as if the parser forgot where a rule was entered from, so too many are.

        Raises:
            OverflowError: the comparisons take too many steps.
        """
        terminals, begin, following = places
        alike = list(range(len(terminals)))  # of places that are read at once: the number of one of them
        together = {begin, *following}
        while True:
            joined = False
            for allowed in together:
                joined |= self._join(self._bits(allowed), terminals, alike)
            after: dict[int, int] = {}
            for place, next_ in enumerate(following):
                after[_found(alike, place)] = after.get(_found(alike, place), 0) | next_
            if not joined:
                break
            together = {begin, *after.values()}
        cut: set[Node] = set()
        seen: set[tuple[Node, int, Node]] = set()
        for allowed in {begin, *after.values()}:
            at = list(self._bits(allowed))
            others = {terminals[place] for place in at}
            for place in at:
                then = self._begin(terminals, following[place])
                self.spend(len(others))
                for other in others - cut if then else ():
                    key = (terminals[place], then, other)
                    if key not in seen:
                        seen.add(key)
                        if self._meet(terminals[place], other)[0] & then:
                            cut.add(other)
        return cut

    def _join(self, places: Iterable[int], terminals: list[Node], alike: list[int]) -> bool:
        """Note which of some places, allowed together, a text may be read at in one go; tell whether any is new."""
        joined = False
        known: dict[Node, int] = {}
        for place in places:
            own, terminal = _found(alike, place), terminals[place]
            self.spend(len(known))
            for other, its in known.items():
                its = _found(alike, its)
                if own != its and (terminal == other or self._meet(terminal, other)[1]):
                    alike[its] = own
                    joined = True
            known.setdefault(terminal, own)
        return joined

    def _begin(self, terminals: list[Node], places: int) -> int:
        """Return the first bytes, as bits, with which a terminal at some places begins."""
        found = 0
        for node in {terminals[place] for place in self._bits(places)}:
            shape = self.shape(node)
            found |= self._lead(shape, shape.first)
        return found


def _found(alike: list[int], place: int) -> int:
    """Return the number that stands for a place, and for all that are like it (union-find)."""
    while alike[place] != place:
        alike[place] = alike[alike[place]]
        place = alike[place]
    return place


def _first_bytes(ranges: Ranges) -> int:
    """Return the first bytes of characters in UTF-8, as bits."""
    found = 0
    for first, last in ranges:
        low, high = chr(first).encode()[0], chr(last).encode()[0]
        found |= (1 << high + 1) - (1 << low)
    return found
