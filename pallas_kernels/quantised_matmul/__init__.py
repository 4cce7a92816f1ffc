"""Multiplies some rows with a matrix held otherwise than as an array, with those of experts, or with the vocabulary's
table.

The functions pick by platform among the modules here, each of which holds functions of those names; platforms without
a module of their own run `reference`. All of them take local arrays as well, so they work inside `jax.shard_map`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, TypeGuard

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.bfloat16_matmul import bfloat16_matmul, bfloat16_matmul_grouped
from pallas_kernels.matmul import chosen_product, matmul, matmul_table
from pallas_kernels.matmul.cpu import matmul_panels
from pallas_kernels.matmul.grouped import matmul_grouped
from pallas_kernels.panelled_floats import PanelledFloats
from pallas_kernels.platform import Impl, resolve_impl
from pallas_kernels.quantised import HeldMatrix, QuantisedMatrix
from pallas_kernels.tiled import TiledMatrix
from pallas_kernels.tiled_floats import TiledFloats
from pallas_kernels.tiled_matmul import tiled_matmul

__all__ = ["quantised_matmul", "quantised_matmul_grouped", "quantised_matmul_table"]

_MODULES: dict[Impl, str] = {name: f"{__name__}.{name}" for name in ("reference", "cpu", "tpu", "gpu")}
"""The module that multiplies for an `Impl`, imported when it first does: Triton's packages may be missing."""


def quantised_matmul(
    x: Float[Array, "rows inputs"],
    matrices: Sequence[HeldMatrix],
    index: int | Int[Array, ""] = 0,
    *,
    rows: Int[Array, ""] | None = None,
    out_dtype: jnp.dtype | None = None,
    input_shards: int = 1,
    impl: Impl | None = None,
) -> Float[Array, "rows outputs"]:
    """Return ``x @ matrices[index]``; only that matrix is read.

    Args:
        matrices: [inputs, outputs] each, with axis -2. On a CPU that holds a `TiledMatrix`, the numbers of x are
            rounded to 8 bits, see `pallas_kernels.tiled_matmul`; with `TiledFloats` that are not `exact` they are
            rounded to bfloat16, see `pallas_kernels.bfloat16_matmul`. `PanelledFloats` are multiplied in float32.
        index: may be traced.
        rows: how many rows of x, the first ones, are wanted; the others may give 0. None: all.
        out_dtype: the result's dtype; None = that of `x`.
        input_shards: shards over which XLA has split the contracted axis. Only TPUs' version asks, to sum up once.
        impl: see `pallas_kernels.platform.Impl`; None picks by platform. ``gpu`` needs unsharded operands.
    """
    dtype = jnp.dtype(out_dtype or x.dtype)
    if resolve_impl(impl) == "cpu" and _all_panelled(matrices):
        return matmul_panels(x, matrices, index, rows).astype(dtype)
    if resolve_impl(impl) == "cpu" and _all_tiled(matrices):
        return bfloat16_matmul(x, matrices, index, rows=rows).astype(dtype)
    if isinstance(matrices[0], TiledFloats | PanelledFloats):
        return chosen_product(lambda x, m: matmul(x, [m.dequantised(x.dtype)], out_dtype=dtype), x, matrices, index)
    run = _module(impl).quantised_matmul
    if resolve_impl(impl) == "tpu":
        run = partial(run, input_shards=input_shards)
    if _multiplies_tiles(matrices, impl):
        return tiled_matmul(x, matrices, index, rows=rows).astype(dtype)
    return chosen_product(lambda x, matrix: run(x, _untiled(matrix), dtype), x, matrices, index)


def quantised_matmul_table(
    x: Float[Array, "rows embed"],
    table: HeldMatrix,
    *,
    rows: Int[Array, ""] | None = None,
    impl: Impl | None = None,
) -> Float[Array, "rows vocab"]:
    """Return ``x @ table.T`` in float32; `table` is [vocab, embed], with axis -1. See `quantised_matmul`."""
    tables = [table]
    if isinstance(table, TiledFloats):
        if resolve_impl(impl) == "cpu":
            return bfloat16_matmul(x, [table], rows=rows)
        return matmul_table(x, table.dequantised(x.dtype))
    if _multiplies_tiles(tables, impl):
        return tiled_matmul(x, tables, rows=rows)
    return _module(impl).quantised_matmul_table(x, _untiled(table))


def quantised_matmul_grouped(
    x: Float[Array, "rows inputs"],
    table: HeldMatrix,
    counts: Int[Array, " experts"],
    *,
    impl: Impl | None = None,
) -> Float[Array, "rows outputs"]:
    """Return each row's product with its expert's matrix, in the dtype of `x`; rows of no expert give 0.

    Args:
        x: sorted by expert: the first ``counts[0]`` rows are expert 0's.
        table: [experts, inputs, outputs], with axis -2.
        impl: see `quantised_matmul`; ``cpu`` needs unsharded operands.
    """
    if isinstance(table, TiledFloats):
        if resolve_impl(impl) == "cpu":
            return bfloat16_matmul_grouped(x, table, counts).astype(x.dtype)
        return matmul_grouped(x, table.dequantised(x.dtype), counts)
    return _module(impl).quantised_matmul_grouped(x, table, counts)


def _all_panelled(matrices: Sequence[HeldMatrix]) -> TypeGuard[Sequence[PanelledFloats]]:
    return isinstance(matrices[0], PanelledFloats)


def _all_tiled(matrices: Sequence[HeldMatrix]) -> TypeGuard[Sequence[TiledFloats]]:
    return isinstance(matrices[0], TiledFloats)


def _multiplies_tiles(matrices: Sequence[HeldMatrix], impl: Impl | None) -> TypeGuard[Sequence[TiledMatrix]]:
    return isinstance(matrices[0], TiledMatrix) and resolve_impl(impl) == "cpu"


def _untiled(matrix: Any) -> QuantisedMatrix:
    return matrix.untiled() if isinstance(matrix, TiledMatrix) else matrix


def _module(impl: Impl | None) -> Any:
    return import_module(_MODULES.get(resolve_impl(impl), _MODULES["reference"]))
