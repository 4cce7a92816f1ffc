"""Goes through a traced program, equation by equation, with values that are known in part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Place = tuple[tuple[int, str], ...]
"""The numbers of an equation and of the calls around it, outermost first, each with the name of what is called."""
Instead = Callable[[Any, list[Any], Place], "list[Any] | None"]
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint")


def evaluate(closed: Any, given: Sequence[Any], instead: Instead) -> list[Any]:
    """Return the results of a program; None for those that are not known.

    Args:
        given: values of its arguments, None for those that are not known.
        instead: called first for each equation that is no call, with its operands and its place; returns its results,
            or None: they are computed if all operands are known.
    """
    return _evaluate(closed.jaxpr, closed.consts, given, instead, ())


def compute(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Return the results of an equation."""
    made = equation.primitive.bind(*operands, **equation.params)
    return list(made) if equation.primitive.multiple_results else [made]


def _evaluate(jaxpr: Any, consts: Sequence[Any], given: Sequence[Any], instead: Instead, around: Place) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, given, strict=True))

    def of(variable: Any) -> Any:
        return variable.val if hasattr(variable, "val") else values.get(variable)

    for number, equation in enumerate(jaxpr.eqns):
        operands = [of(variable) for variable in equation.invars]
        place = (*around, (number, equation.params.get("name") or (around[-1][1] if around else "")))
        if equation.primitive.name in _CALLS:
            inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
            body, body_consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, [])
            results = _evaluate(body, body_consts, operands, instead, place)
        else:
            found = instead(equation, operands, place)
            known = all(operand is not None for operand in operands)
            results = found or (compute(equation, operands) if known else [None] * len(equation.outvars))
        values.update(zip(equation.outvars, results, strict=True))
    return [of(variable) for variable in jaxpr.outvars]
