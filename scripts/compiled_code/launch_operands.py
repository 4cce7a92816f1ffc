"""Finds the integers that a program gives to its Pallas kernels, without running the kernels or their arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Launches = dict[str, list[dict[int, Any]]]


def launch_operands(function: Any, arguments: Sequence[Any], known: Mapping[int, np.ndarray]) -> Launches:
    """Return the integer operands of each launch by their index, by the kernel's name and in the order of launches.

    Traces `function`, and computes on this machine what depends on nothing but the known arguments.

    Args:
        arguments: shapes and dtypes, on the mesh of an absent chip.
        known: values of some of these by their place, as block tables and lengths.
    """
    import jax

    with jax.set_mesh(arguments[0].sharding.mesh):
        closed = jax.make_jaxpr(function)(*arguments)

    @jax.jit
    def operands(values: dict[int, Any]) -> Launches:
        found: Launches = {}
        _evaluate(closed.jaxpr, closed.consts, [values.get(place) for place in range(len(arguments))], found, "")
        return found

    return jax.tree.map(np.asarray, operands(dict(known)))


def _evaluate(jaxpr: Any, consts: Sequence[Any], given: Sequence[Any], found: Launches, caller: str) -> list[Any]:
    """Return the results of a program as far as they are known; None: not. Adds the operands of launches to `found`.

    A kernel without a name has that of the function around it, its `caller`.
    """
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, given, strict=True))

    def of(variable: Any) -> Any:
        return variable.val if hasattr(variable, "val") else values.get(variable)

    for equation in jaxpr.eqns:
        operands = [of(variable) for variable in equation.invars]
        results: list[Any] = [None] * len(equation.outvars)
        inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        if equation.primitive.name == "pallas_call":
            launch = {i: x + 0 for i, x in enumerate(operands) if x is not None and _is_integer(equation.invars[i])}
            found.setdefault(equation.params["name"] or caller, []).append(launch)
        elif equation.primitive.name in _CALLS:
            body, body_consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, [])
            results = _evaluate(body, body_consts, operands, found, equation.params.get("name") or caller)
        elif all(operand is not None for operand in operands):
            made = equation.primitive.bind(*operands, **equation.params)
            results = list(made) if equation.primitive.multiple_results else [made]
        values.update(zip(equation.outvars, results, strict=True))
    return [of(variable) for variable in jaxpr.outvars]


_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint")


def _is_integer(variable: Any) -> bool:
    """Tell whether a kernel's operand is integers, or truths, which kernels get as such."""
    dtype = variable.aval.dtype
    return bool(np.issubdtype(dtype, np.integer) or np.issubdtype(dtype, np.bool_))
