"""Multiplies some rows with bfloat16 matrices held in tiles, by a CPU's instructions for pairs of them.

Each row's numbers are rounded to bfloat16 inside the product; sums are float32. A row's result does not depend on the
other rows. Kinds of instructions (`cpu_pairs`) differ in the last bits.

With matrices of `product="float32"` no row is rounded, and the result has the bits that `pallas_kernels.matmul` gives
with the same matrices in float32, on any machine (`cpu_float32`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu_features import best_pair_kind
from pallas_kernels.custom_calls import target
from pallas_kernels.tiled_floats import TiledFloats, rounded_numbers

if TYPE_CHECKING:
    from pallas_kernels.cpu_features import PairKind as Kind

__all__ = ["bfloat16_matmul", "bfloat16_matmul_grouped"]


def bfloat16_matmul(
    x: Float[Array, "rows inputs"],
    matrices: Sequence[TiledFloats],
    index: int | Int[Array, ""] = 0,
    *,
    rows: Int[Array, ""] | None = None,
    kind: Kind | None = None,
) -> Float[Array, "rows outputs"]:
    """Return ``x @ matrices[index]`` in float32; only that matrix is read. Needs Numba and unsharded operands.

    Args:
        matrices: of one shape; a table, with axis -1, is multiplied as its transpose.
        index: may be traced.
        rows: how many rows of x, the first ones, are wanted; the others give 0. None: all.
        kind: which instructions multiply rounded rows; None = the best ones that this machine has.
    """
    first = matrices[0]
    index_and_rows = jnp.asarray([index, len(x) if rows is None else rows], jnp.int32)
    bits = [matrix.bits for matrix in matrices]
    result = jax.ShapeDtypeStruct((len(x), first.outputs), jnp.float32)
    if first.product == "float32":
        name = target("bfloat16_matmul.cpu_float32:float32_target")
        return jax.ffi.ffi_call(name, result)(x.astype(jnp.float32), index_and_rows, *bits)
    results = result, jax.ShapeDtypeStruct((len(x), rounded_numbers(first.inputs)), jnp.uint16)
    call = jax.ffi.ffi_call(target("bfloat16_matmul.cpu_kernel:target", kind or best_pair_kind()), results)
    return call(x.astype(jnp.float32), index_and_rows, *bits)[0]


def bfloat16_matmul_grouped(
    x: Float[Array, "rows inputs"], table: TiledFloats, counts: Int[Array, " experts"], *, kind: Kind | None = None
) -> Float[Array, "rows outputs"]:
    """Return each row's product with its expert's matrix in float32; rows of no expert give 0.

    Args:
        x: sorted by expert: the first ``counts[0]`` rows are expert 0's.
        table: [experts, inputs, outputs]; only matrices of experts that have rows are read.
        kind: see `bfloat16_matmul`.
    """
    result = jax.ShapeDtypeStruct((len(x), table.outputs), jnp.float32)
    if table.product == "float32":
        name = target("bfloat16_matmul.cpu_float32:float32_grouped_target")
        return jax.ffi.ffi_call(name, result)(x.astype(jnp.float32), table.bits, counts.astype(jnp.int32))
    results = result, jax.ShapeDtypeStruct((len(x), rounded_numbers(table.inputs)), jnp.uint16)
    all_rows = jnp.asarray([0, len(x)], jnp.int32)
    call = jax.ffi.ffi_call(target("bfloat16_matmul.cpu_kernel:grouped_target", kind or best_pair_kind()), results)
    return call(x.astype(jnp.float32), all_rows, table.bits, counts.astype(jnp.int32))[0]
