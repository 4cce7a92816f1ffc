"""Multiplies some rows with quantised matrices held in tiles, in a CPU's loops.

Where rows may be rounded (`QuantisedMatrix.rounds_rows`) and there are integer instructions for the codes, each row's
numbers are rounded to 8 bits inside the product, a group of neighbours sharing a scale: the matrix' groups where it has
some, else as long as `ROUNDED_TOGETHER` allows. All kinds of instructions (`pallas_kernels.cpu_dots`) give the same
integers. Other products decode the codes and multiply in float32 (`cpu_exact`). A row's result does not depend on the
other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu_features import Kind, best_kind, kind_for, kinds_here
from pallas_kernels.custom_calls import target
from pallas_kernels.tiled import INPUTS, TiledMatrix, has_integer_products
from pallas_kernels.tiled_matmul.variant import ExactVariant, TileVariant, rounded_bytes

__all__ = ["rounded_together", "tiled_matmul", "tiled_matmul_grouped"]

ROUNDED_TOGETHER = 64
"""The most neighbours of a row that share a scale, where the matrix has one scale an output. With one scale a row,
SmolLM2-135M's perplexity grows by 3 %."""


def tiled_matmul(
    x: Float[Array, "rows inputs"],
    matrices: Sequence[TiledMatrix],
    index: int | Int[Array, ""] = 0,
    *,
    rows: Int[Array, ""] | None = None,
    kind: Kind | None = None,
) -> Float[Array, "rows outputs"]:
    """Return ``x @ matrices[index]`` in float32; only that matrix is read. Needs Numba and unsharded operands.

    Args:
        matrices: alike in everything but their numbers; a table, with axis -1, is multiplied as its transpose.
        index: may be traced.
        rows: how many rows of x, the first ones, are wanted; the others give 0. None: all.
        kind: which integer instructions multiply; None = the best ones that this machine has.

    Raises:
        ValueError: this machine has no such instructions, or rows are not rounded and `kind` names some; shapes do not
            fit.
    """
    first = matrices[0]
    _check(x, first, kind)
    index_and_rows = jnp.asarray([index, len(x) if rows is None else rows], jnp.int32)
    codes, scales = [m.codes for m in matrices], [m.scales for m in matrices]
    minimums = [] if first.minimums is None else [m.minimums for m in matrices]
    operands = x.astype(jnp.float32), index_and_rows, *codes, *scales, *minimums
    if not rounds(first):
        exact, result = target("tiled_matmul.cpu_exact:target", _exact(first)), (len(x), first.outputs)
        return jax.ffi.ffi_call(exact, jax.ShapeDtypeStruct(result, jnp.float32))(*operands)
    variant, results = _described(x, first, kind)
    return jax.ffi.ffi_call(target("tiled_matmul.cpu_kernel:target", variant), results)(*operands)[0]


def tiled_matmul_grouped(
    x: Float[Array, "rows inputs"], table: TiledMatrix, counts: Int[Array, " experts"], *, kind: Kind | None = None
) -> Float[Array, "rows outputs"]:
    """Return each row's product with its expert's matrix in float32; rows of no expert give 0.

    Args:
        x: sorted by expert: the first ``counts[0]`` rows are expert 0's.
        table: [experts, inputs, outputs]; only matrices of experts that have rows are read.
        kind: see `tiled_matmul`.

    Raises:
        ValueError: this machine has no such instructions, or rows are not rounded and `kind` names some; shapes do not
            fit.
    """
    _check(x, table, kind)
    if counts.shape != table.shape[:1]:
        raise ValueError(f"counts of {counts.shape} are not those of the experts of a table of {table.shape}")
    minimums = [] if table.minimums is None else [table.minimums]
    x, operands = x.astype(jnp.float32), (table.codes, table.scales, *minimums, counts.astype(jnp.int32))
    if not rounds(table):
        exact, result = target("tiled_matmul.cpu_exact:grouped_target", _exact(table)), (len(x), table.outputs)
        return jax.ffi.ffi_call(exact, jax.ShapeDtypeStruct(result, jnp.float32))(x, *operands)
    variant, results = _described(x, table, kind)
    call = jax.ffi.ffi_call(target("tiled_matmul.cpu_kernel:grouped_target", variant), results)
    return call(x, jnp.asarray([0, len(x)], jnp.int32), *operands)[0]


def rounds(matrix: TiledMatrix) -> bool:
    """Tell whether products round rows to 8 bits: they may, and there are integer instructions for the codes."""
    group = matrix.inputs // matrix.scales.shape[-2]
    return matrix.rounds_rows and has_integer_products(matrix.codec, group, matrix.inputs)


def _check(x: Array, matrix: TiledMatrix, kind: Kind | None) -> None:
    if x.shape[1] != matrix.inputs:
        raise ValueError(f"rows of {x.shape[1]} numbers, but a matrix of {matrix.inputs} inputs")
    if kind is not None and kind not in kinds_here():
        raise ValueError(f"kind={kind!r} is none of {', '.join(kinds_here())}, which this machine has")
    if kind is not None and not rounds(matrix):
        raise ValueError(f"kind={kind!r}, but rows are not rounded, and no integer instructions multiply")


def _exact(matrix: TiledMatrix) -> ExactVariant:
    return ExactVariant(matrix.codec.name, jnp.dtype(matrix.scales.dtype).name, matrix.minimums is not None)


def _described(
    x: Array, matrix: TiledMatrix, kind: Kind | None
) -> tuple[TileVariant, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """Return the variant of a matrix, and the results of a product: the product itself, the rows' rounded numbers and
    the factors of their groups."""
    groups, has_minimums, packed = matrix.scales.shape[-2], matrix.minimums is not None, matrix.codec.paired
    shared = groups == 1 and not packed and not has_minimums
    if shared:
        groups = matrix.inputs // rounded_together(matrix.inputs)
    half = matrix.scales.dtype == jnp.float16
    instructions = kind_for(kind or best_kind(), matrix.inputs // groups, packed=packed, grouped=groups > 1)
    variant = TileVariant(instructions, groups > 1, shared and groups > 1, packed, has_minimums, matrix.offset, half)
    return variant, (
        jax.ShapeDtypeStruct((len(x), matrix.outputs), jnp.float32),
        jax.ShapeDtypeStruct((len(x), rounded_bytes(matrix.inputs, variant)), jnp.int8),
        jax.ShapeDtypeStruct((len(x), groups, 3), jnp.float32),
    )


def rounded_together(inputs: int) -> int:
    """Return how many neighbours of a row share a scale where the matrix has no groups: all where none of the lengths
    that are allowed divides the row."""
    lengths = range(ROUNDED_TOGETHER, 4 * INPUTS - 1, -INPUTS)
    return next((length for length in lengths if inputs % length == 0), inputs)
