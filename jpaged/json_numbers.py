"""Writes the bounds and steps of numbers in JSON schemas so that llguidance, which holds floats, keeps to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeGuard

MOST_INTEGER = 2**63 - 1
"""Most of a bound of integers; llguidance takes the float for it, 2**63, for this integer."""
LEAST_INTEGER = 1024 - 2**63
"""Least of a bound of integers, as -2**63 ends the process: the next float."""
MOST_FLOAT = 9_223_372_036_854_775_000
"""Most of other bounds: the largest float below 2**63, in the digits that llguidance writes it with."""
_EXACT = 2**53
"""Integers beyond it may not be floats; nor is the one after it."""
_FAR = 10**18
"""From here on llguidance takes a bound only if there is one on the other side too."""
_SIDES = ((1, "minimum", "exclusiveMinimum"), (-1, "maximum", "exclusiveMaximum"))
_NEIGHBOURS = 4
"""Floats on each side of a step that are looked at; two suffice."""
_MOST_COEFFICIENT = 2**32 - 1
"""Most of a step without its decimal point."""


def narrow_bounds(node: dict[str, Any]) -> None:
    """Replace a schema's bounds from 2**53 on by the next ones within that llguidance keeps to.

    Those beyond `reach` become that. A bound that leaves nothing within stays, and `first_out_of_reach` returns it.
    """
    integers = _is_of_integers(node)
    for sign, plain, exclusive in _SIDES:
        least, limit = _signed_reach(node, sign)
        given = [(node.get(plain), node.get(exclusive) is True), (node.get(exclusive), True)]  # True: of draft 4
        bounds = [(value * sign, without) for value, without in given if is_number(value)]
        if any(abs(value) >= _EXACT for value, _ in bounds):
            within = [_within(*bound, integers, least, limit) for bound in bounds]
            if None not in within:
                node.pop(exclusive, None)
                node[plain] = max(each for each in within if each is not None) * sign
    lower, upper = (next((node[key] for key in side[1:] if is_number(node.get(key))), None) for side in _SIDES)
    if upper is None and lower is not None and lower >= _FAR:
        node["maximum"] = reach(node)[1]
    if lower is None and upper is not None and upper <= -_FAR:
        node["minimum"] = reach(node)[0]


def _within(value: float, without: bool, integers: bool, least: int, limit: int) -> float | None:
    """Return the least number at or above a bound that llguidance keeps to; None if it is above `limit`."""
    if integers and (isinstance(value, int) or math.isfinite(value)):
        value, without = math.floor(value) + 1 if without else math.ceil(value), False
    if value < least or (value == least and not without):
        return least
    if value > limit:
        return None
    near = float(value)
    while (held := _held(near, integers)) < value or (without and held == value):
        near = math.nextafter(near, math.inf)
    return held if held <= limit else limit if integers else None


def _held(near: float, integers: bool) -> float:
    """Return the number that llguidance makes of a float: where it need be no integer, of the digits that it prints."""
    return int(near if integers else Decimal(str(near))) if near.is_integer() else near


def first_out_of_reach(node: Mapping[str, Any], *, narrowed: bool) -> str | None:
    """Return a keyword whose bound llguidance cannot be given.

    Args:
        narrowed: whether `narrow_bounds` is yet to come, so that only bounds which leave nothing count.
    """
    for sign, *keywords in _SIDES:
        least, limit = _signed_reach(node, sign)
        for keyword in keywords:
            value = node.get(keyword)
            if is_number(value) and (value * sign > limit or (value * sign < least and not narrowed)):
                return keyword
    return None


def reach(node: Mapping[str, Any]) -> tuple[int, int]:
    """Return the least and the most of a bound in a schema."""
    return (LEAST_INTEGER, MOST_INTEGER) if _is_of_integers(node) else (-MOST_FLOAT, MOST_FLOAT)


def _signed_reach(node: Mapping[str, Any], sign: int) -> tuple[int, int]:
    least, most = reach(node)
    return (least, most) if sign > 0 else (-most, -least)


def _is_of_integers(node: Mapping[str, Any]) -> bool:
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return "integer" in kinds and "number" not in kinds


def is_number(value: Any) -> TypeGuard[float]:
    """Tell whether a value is a number of JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def is_held(integer: int) -> bool:
    """Tell whether llguidance writes an integer that a text must have, as a `const`, with its own digits."""
    return integer == MOST_INTEGER or (LEAST_INTEGER <= integer < MOST_INTEGER and int(float(integer)) == integer)


def follow_decimals(node: dict[str, Any]) -> None:
    """Write a schema's bounds and `multipleOf` such that llguidance takes the numbers of fewer decimals than they have.

    It does not take 12.2 where 12.25 is the most, nor 0.5 where the step is 0.25.
    """
    for options in (_bounds_by_decimals(node, 1), _bounds_by_decimals(node, -1), _steps_by_decimals(node)):
        if len(options) < 2 or not isinstance(node.get("allOf", []), list):
            continue
        for keyword in options[0]:
            del node[keyword]
        either = {"anyOf": [options[0], *({"type": "number", **option} for option in options[1:])]}
        if "anyOf" in node or "allOf" in node:
            node["allOf"] = [*node.get("allOf", []), either]
        else:
            node |= either


def _bounds_by_decimals(node: Mapping[str, Any], sign: int) -> list[dict[str, float]]:
    """Return the bounds on one side, and those which each number of fewer decimals of that bound adds."""
    plain, exclusive = next(keywords for side, *keywords in _SIDES if side == -sign)
    given = {key: node[key] for key in (plain, exclusive) if key in node}
    bounds = [each for each in given.values() if is_number(each) and (isinstance(each, int) or math.isfinite(each))]
    bound = min((Decimal(each if isinstance(each, int) else str(each)) * sign for each in bounds), default=Decimal(0))
    if bound <= 0 or _is_of_integers(node):
        return []
    decimals = -int(bound.as_tuple().exponent)
    cut = {math.floor(bound.scaleb(fewer)) / Decimal(10**fewer) for fewer in range(1, decimals)} - {bound}
    return [given, *({plain: float(each) * sign} for each in sorted(cut))]


def _steps_by_decimals(node: dict[str, Any]) -> list[dict[str, float]]:
    """Return a schema's `multipleOf` for each number of decimals; write that of integers as one.

    llguidance takes a number whose digits, read as an integer, are a multiple of the step's, if it has as many decimals
    or fewer: 2.5 for 0.25.
    """
    step = node.get("multipleOf")
    if not is_number(step) or not 0 < step < math.inf:
        return []
    coefficient, decimals = decimal_of(step)
    steps: dict[int, int] = {}
    for fewer in range(decimals, 0, -1):
        steps.setdefault(coefficient // math.gcd(coefficient, 10 ** (decimals - fewer)), fewer)
    if _is_of_integers(node):
        node["multipleOf"] = coefficient // math.gcd(coefficient, 10**decimals)
        return []
    floats = [each for step in steps.items() if (each := _float_read_as(*step)) is not None]
    if len(floats) < len(steps):
        return []  # the step stays, for `unfollowed_step` or without the numbers of fewer decimals
    node["multipleOf"] = floats[0] if floats else step
    return [{"multipleOf": each} for each in floats]


def unfollowed_step(node: Mapping[str, Any]) -> float | None:
    """Return a schema's `multipleOf` if llguidance reads no float as it; of integers each one can be followed."""
    step = node.get("multipleOf")
    if not is_number(step) or not 0 < step < math.inf or _is_of_integers(node):
        return None
    coefficient, decimals = decimal_of(step)
    return step if decimals > 0 and _float_read_as(coefficient, decimals) is None else None


def decimal_of(step: float) -> tuple[int, int]:
    """Return a positive number without its decimal point, and how many decimals that has.

    >>> decimal_of(0.25), decimal_of(1.0), decimal_of(0.07), decimal_of(0.07000000000000001)
    ((25, 2), (1, 0), (7, 2), (7, 2))
    """
    if isinstance(step, int):
        return step, 0
    if (read := _as_read(step)) is not None:
        return read
    written = Decimal(str(step)).normalize()
    exponent = int(written.as_tuple().exponent)
    return int(written.scaleb(max(-exponent, 0))), max(-exponent, 0)


def _as_read(step: float) -> tuple[int, int] | None:
    """Return what llguidance reads: it multiplies a float by ten until no decimals are left."""
    decimals = 0
    while not step.is_integer():
        step *= 10
        decimals += 1
    if step > _MOST_COEFFICIENT:
        return None
    coefficient = int(step)
    while decimals and coefficient % 10 == 0:
        coefficient, decimals = coefficient // 10, decimals - 1
    return coefficient, decimals


def _float_read_as(coefficient: int, decimals: int) -> float | None:
    """Return a float that llguidance reads as a decimal number: it, or one next to it, as products are rounded."""
    below = above = float(Fraction(coefficient, 10**decimals))
    for _ in range(_NEIGHBOURS):
        for each in (below, above):
            if _as_read(each) == (coefficient, decimals):
                return each
        below, above = math.nextafter(below, 0), math.nextafter(above, math.inf)
    return None
