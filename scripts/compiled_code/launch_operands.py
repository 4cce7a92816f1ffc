"""Finds the integers that a program gives to its Pallas kernels, without running the kernels or their arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scripts.compiled_code.evaluation import Place, evaluate

Launches = dict[str, list[dict[int, Any]]]


def launch_operands(function: Any, arguments: Sequence[Any], known: Mapping[int, np.ndarray]) -> Launches:
    """Return the integer operands of each launch by their index, by the kernel's name and in the order of launches.

    Traces `function`, and computes on this machine what depends on nothing but the known arguments. A kernel without a
    name has that of the function around it.

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

        def launched(equation: Any, operands: list[Any], place: Place) -> list[Any] | None:
            if equation.primitive.name != "pallas_call":
                return None
            launch = {i: x + 0 for i, x in enumerate(operands) if x is not None and _is_integer(equation.invars[i])}
            found.setdefault(place[-1][1], []).append(launch)
            return [None] * len(equation.outvars)

        evaluate(closed, [values.get(place) for place in range(len(arguments))], launched)
        return found

    return jax.tree.map(np.asarray, operands(dict(known)))


def _is_integer(variable: Any) -> bool:
    """Tell whether a kernel's operand is integers, or truths, which kernels get as such."""
    dtype = variable.aval.dtype
    return bool(np.issubdtype(dtype, np.integer) or np.issubdtype(dtype, np.bool_))
