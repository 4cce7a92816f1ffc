"""Refuses schemas and grammars that would take the compiler's whole stack, or more time than a request may have."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from jpaged.json_numbers import decimal_of, first_out_of_reach, is_held, reach, unfollowed_step
from jpaged.json_schema import NAMES, NO_LENGTH, VALUES, pointed_at
from jpaged.structured_outputs import MOST_CHOICES, StructuredOutputsParams

MOST_LEVELS = 6000
"""Most levels of nesting that a chain of references has in all. llguidance takes up to 5 KB of stack for one, and
`jpaged.text.grammar` has 64 MiB."""
MOST_INTERSECTIONS = 12
"""Most `&` of a Lark grammar; each may double the states that the compiler looks at."""
MOST_ALTERNATIVES = 2_000
"""Most parts of one `anyOf` or `oneOf`: each token's mask takes time that grows with their square, a third of a second
for 4,000."""
MOST_ALTERNATIVES_IN_ALL = 10_000
"""Most parts of all `anyOf` and `oneOf` of a request's schemas."""
MOST_MULTIPLES = 65_536
"""Limit of a schema's `multipleOf` by its digits, and of the least common multiple of those that may meet in one
number: as many states."""

# Takes linear time on any text: what is not closed is matched to the end of its line, so that no search begins within.
_HIDDEN = re.compile(
    r"""
    "(?:\\.|[^"\\\n])*+"?            # a text
    | (?://|\#)[^\n]*                # a comment
    | /(?:\\.|[^/\\\n])++/?          # a regular expression
    | <[^<>\s]+>                     # special tokens
    """,
    re.VERBOSE,
)
_JSON = re.compile(r"%json\s*")
_RULE = re.compile(
    r"\b([A-Za-z_]\w*)(?: ?\{[\w ,]{0,200}\})?(?:::\w+)?"  # its name and parameters
    r"(?: ?\.-?\d+)?(?: ?\[[^\]]{0,200}\])?(?: ?\.-?\d+)? ?:(?!:)"  # its priority and attributes
)
_NAME = re.compile(r"[A-Za-z_]\w*")


def check_limits(params: StructuredOutputsParams, lark: str | None) -> None:
    """Refuse a shape that the compiler cannot be given.

    Args:
        lark: the compiled form of `params.grammar`.

    Raises:
        ValueError: references go too deep, there are too many values or intersections, or a multiple is too large; the
            message names the value and the limit.
    """
    if params.json is not None:
        check_schemas("json", [params.json], narrowed=True)
    if lark is not None:
        check_lark(lark)


def check_lark(lark: str) -> None:
    """Refuse a Lark grammar that the compiler cannot be given; see `check_limits`."""
    rules, schemas = _without_schemas(lark)
    check_schemas("a schema of grammar", schemas)
    plain = " ".join(_HIDDEN.sub(' "" ', rules).split())
    _check("grammar", "intersections (&)", plain.count("&"), MOST_INTERSECTIONS)
    found = list(_RULE.finditer(plain))
    levels: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    for rule, after in pairwise([*found, None]):
        assert rule is not None
        body = plain[rule.end() : after.start() if after else len(plain)]
        levels[rule[1]] = max(levels.get(rule[1], 0), 1 + _nesting(body))
        names.setdefault(rule[1], []).extend(_NAME.findall(body))
    _check_levels("grammar", longest_chain(levels, names))


def check_schemas(name: str, schemas: Sequence[Any], *, narrowed: bool = False) -> None:
    """Refuse JSON schemas that the compiler cannot be given together; see `check_limits`.

    Args:
        narrowed: whether `jpaged.json_schema` narrows bounds of numbers before the compiler has them.
    """
    num_values = num_alternatives = 0
    for schema in schemas:
        levels, references = _levels_of(schema)
        _check_levels(name, longest_chain(levels, references))
        nodes = [node for node, _, _ in _nodes(schema)]
        num_values += sum(len(values) for node in nodes if isinstance(values := node.get("enum"), list))
        for keyword in ("anyOf", "oneOf"):
            widths = [len(parts) for node in nodes if isinstance(parts := node.get(keyword), list)]
            _check(name, f"parts in one {keyword}", max(widths, default=0), MOST_ALTERNATIVES)
            num_alternatives += sum(widths)
        _check_multiples(name, nodes)
        _check_numbers(name, nodes, narrowed)
    _check(name, "values of enum", num_values, MOST_CHOICES)
    _check(name, "parts in anyOf and oneOf", num_alternatives, MOST_ALTERNATIVES_IN_ALL)


def _check_multiples(name: str, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Check the steps of numbers: each, or all together where a number may have to follow several."""
    steps = [step for node in nodes if isinstance(step := node.get("multipleOf"), int | float)]
    together = any("allOf" in node or "$ref" in node for node in nodes)
    common = 1
    for step in steps:
        if isinstance(step, bool) or not 0 < step < math.inf:
            continue
        digits = _digits(step)
        common = math.lcm(common, digits) if together and digits <= MOST_MULTIPLES else digits
        if common > MOST_MULTIPLES:  # at once: the multiple of thousands has as many digits
            shown = str(common) if common < 2**64 else f"about 2**{common.bit_length() - 1}"
            raise ValueError(f"{name} has a multipleOf of {shown}, by its digits, the limit is {MOST_MULTIPLES}")


def _check_numbers(name: str, nodes: Sequence[Mapping[str, Any]], narrowed: bool) -> None:
    """Check lengths, bounds, and the integers that a text may have to be.

    llguidance writes integers that no float is as others; bounds near -2**63 end the process.
    """
    for node in nodes:
        for keyword in ("minLength", "minItems", "minProperties"):
            if type(length := node.get(keyword)) is int and length >= NO_LENGTH:
                raise ValueError(f"{name} has {keyword}={_shown(length)}, the limit is 2**31 - 1")
        if (bound := first_out_of_reach(node, narrowed=narrowed)) is not None:
            least, most = reach(node)
            raise ValueError(f"{name} has {bound}={_shown(node[bound])}, the limits are {least} and {most}")
        if (step := unfollowed_step(node)) is not None:
            raise ValueError(f"{name} has multipleOf={step} of numbers, which cannot be followed: round it")
        for keyword in ("const", "enum"):
            waiting = [node.get(keyword)]
            while waiting:
                value = waiting.pop()
                if isinstance(value, Mapping | list):
                    waiting += value.values() if isinstance(value, Mapping) else value
                elif isinstance(value, int) and not is_held(value):
                    raise ValueError(
                        f"{name} has the integer {_shown(value)} in {keyword}, which is no float64 below 2**63: "
                        "write it as a text"
                    )


def _shown(number: float) -> str:
    if isinstance(number, int) and number.bit_length() > 128:
        return f"{'-' if number < 0 else ''}2**{number.bit_length() - 1} and more"
    return str(number)


_MOST_BITS = 14_000
"""Bits of an integer that Python writes as a decimal number; a longer one is refused, zeros at its end or not."""


def _digits(number: float) -> int:
    """Return a number without its decimal point and the zeros at its end.

    >>> _digits(0.25), _digits(5000), _digits(10**40 + 1) == 10**40 + 1
    (25, 5, True)
    """
    if isinstance(number, int):
        return number if number.bit_length() > _MOST_BITS else int(str(number).rstrip("0"))
    coefficient, _ = decimal_of(number)
    return int(str(coefficient).rstrip("0"))


def _check(name: str, things: str, number: int, most: int) -> None:
    if number > most:
        raise ValueError(f"{name} has {number} {things}, the limit is {most}")


def _check_levels(name: str, levels: int) -> None:
    if levels > MOST_LEVELS:
        raise ValueError(f"{name} nests {levels} levels deep, its references followed, the limit is {MOST_LEVELS}")


def _without_schemas(lark: str) -> tuple[str, list[Any]]:
    """Return a grammar without the JSON that follows `%json`, and the JSON that was removed."""
    kept, schemas, at = [], [], 0
    for mark in _JSON.finditer(lark):
        if mark.start() < at:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, mark.end())
        except (json.JSONDecodeError, RecursionError):
            break  # the compiler refuses both
        kept.append(lark[at : mark.end()])
        schemas.append(schema)
        at = end
    return "".join([*kept, lark[at:]]), schemas


def _nesting(body: str) -> int:
    """Return how deep the brackets of a rule are."""
    deep = most = 0
    for letter in body:
        deep += (letter in "([{") - (letter in ")]}" and deep > 0)
        most = max(most, deep)
    return most


def _levels_of(schema: Any) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Return the number of levels of each part of a schema that is referred to, and the parts to which it refers.

    Parts are named by their Python id; the schema itself is one, without those in it.
    """
    nodes = list(_nodes(schema))
    aims = _aims(schema, nodes)
    known = {id(node) for node, _, _ in nodes}
    if any(isinstance(aim, Mapping) and id(aim) not in known for _, aim in aims):  # a reference to an example
        nodes = list(_nodes(schema, values_too=True))
        aims = _aims(schema, nodes)
    bases = (node.get(key) for node, holder, _ in nodes if holder is not None for key in ("$id", "id"))
    if any(aim is None for _, aim in aims) or any(isinstance(base, str) for base in bases):
        deepest = max((depth for _, _, depth in nodes), default=0)
        return {0: (1 + deepest) * (1 + len(aims))}, {}  # each may lead anywhere
    begins = {id(schema), *(id(aim) for _, aim in aims)}
    levels: dict[int, int] = {}
    references: dict[int, list[int]] = {}
    part_of: dict[int | None, int] = {}
    start: dict[int, int] = {}  # depth at which each part begins
    for node, holder, depth in nodes:  # an object's holder comes before it
        part = part_of[id(node)] = id(node) if id(node) in begins else part_of[holder]
        if part == id(node) and holder is not None:
            references.setdefault(part_of[holder], []).append(part)
        levels[part] = max(levels.get(part, 0), 1 + depth - start.setdefault(part, depth))
    for node_id, aim in aims:
        references.setdefault(part_of[node_id], []).append(id(aim))
    return levels, references


def _aims(schema: Any, nodes: Iterable[tuple[Mapping[str, Any], int | None, int]]) -> list[tuple[int, Any]]:
    """Return, for each object with a reference, its id and its target."""
    return [(id(node), pointed_at(schema, node["$ref"])) for node, _, _ in nodes if isinstance(node.get("$ref"), str)]


def _nodes(schema: Any, *, values_too: bool = False) -> Iterable[tuple[Mapping[str, Any], int | None, int]]:
    """Yield the objects in a schema, each with the id of the one that holds it and how many hold that one.

    Args:
        values_too: whether to look into keywords that hold plain values, such as an example.
    """
    waiting: list[tuple[Any, int | None, int, bool]] = [(schema, None, 0, False)]
    while waiting:
        value, holder, depth, names = waiting.pop()
        if isinstance(value, Mapping):
            yield value, holder, depth
            for key, each in value.items():
                if isinstance(each, Mapping | list) and (names or values_too or key not in VALUES):
                    waiting.append((each, id(value), depth + 1, not names and key in NAMES))
        elif isinstance(value, list):
            waiting += [(each, holder, depth, False) for each in value if isinstance(each, Mapping | list)]


Name = TypeVar("Name", bound=Hashable)


def longest_chain(levels: Mapping[Name, int], references: Mapping[Name, Iterable[Name]]) -> int:
    """Return the most levels that a chain of references has in all, if it enters nothing twice.

    Where some refer to each other in a circle, the chain is taken to go through all of them: the result is never too
    small, and exact where there are no circles.

    Args:
        levels: number of levels of each name itself, without its references.
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
    """Find strongly connected components by Tarjan's algorithm, without recursion."""
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
