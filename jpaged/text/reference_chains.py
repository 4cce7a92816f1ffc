"""How deep a chain of references goes, in a graph that may have circles."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def longest_chain(levels: Mapping[Name, int], references: Mapping[Name, Iterable[Name]]) -> int:
    """Return the most levels that a chain of references has in all, if it enters nothing twice.

    Where some refer to each other in a circle, the chain is taken to go through all of them: the result is never too
    small, and exact where there are no circles.

    Args:
        levels: how many levels each name has of its own.
        references: the names that each one refers to; those that have no levels are left out.

    >>> longest_chain({"a": 1, "b": 2, "c": 1}, {"a": ["b", "c"], "b": ["c"]})
    4
    """
    deepest: dict[Name, int] = {}  # of the chains that begin with each name whose circle is complete
    number: dict[Name, int] = {}
    for first in levels:
        if first not in number:
            _visit(first, levels, references, number, deepest)
    return max(deepest.values(), default=0)


def _visit(
    first: Name,
    levels: Mapping[Name, int],
    references: Mapping[Name, Iterable[Name]],
    number: dict[Name, int],
    deepest: dict[Name, int],
) -> None:
    """Do what Tarjan's algorithm does for strongly connected components, without recursion."""
    low: dict[Name, int] = {}
    open_names: list[Name] = []
    path = [(first, iter(references.get(first, ())))]
    number[first] = low[first] = len(number)
    open_names.append(first)
    while path:
        name, rest = path[-1]
        for other in rest:
            if other not in levels:
                continue
            if other not in number:
                number[other] = low[other] = len(number)
                open_names.append(other)
                path.append((other, iter(references.get(other, ()))))
                break
            if other not in deepest:
                low[name] = min(low[name], number[other])
        else:
            path.pop()
            if path:
                low[path[-1][0]] = min(low[path[-1][0]], low[name])
            if low[name] == number[name]:
                circle = [open_names.pop()]
                while circle[-1] != name:
                    circle.append(open_names.pop())
                beyond = {other for each in circle for other in references.get(each, ()) if other in deepest}
                total = sum(levels[each] for each in circle) + max((deepest[other] for other in beyond), default=0)
                deepest.update(dict.fromkeys(circle, total))
