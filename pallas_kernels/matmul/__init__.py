"""Multiplies up to some thousand rows with a layer's matrix, the vocabulary's table, or the matrices of experts.

XLA has its own products, and they are right for sharded operands, which a custom call would gather. On a CPU that
holds a model alone, `cpu` reads each matrix once from where it lies: XLA:CPU repacks it for every product, which costs
as much as multiplying a few dozen rows.

XLA on CPUs and GPUs multiplies every row with every expert's matrix and masks (`jax.lax.ragged_dot`; 32 times the work
of 32 experts). `cpu` and `gpu_grouped` multiply each row only with its own expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu_features import LANES
from pallas_kernels.custom_calls import target
from pallas_kernels.gpu_launch import multiplies, reaches
from pallas_kernels.matmul import cpu
from pallas_kernels.platform import Impl

__all__ = ["chosen_product", "matmul", "matmul_grouped", "matmul_table"]


def matmul(
    x: Float[Array, "rows inputs"],
    matrices: Sequence[Float[Array, "inputs outputs"]],
    index: int | Int[Array, ""] = 0,
    *,
    rows: Int[Array, ""] | None = None,
    out_dtype: jnp.dtype | None = None,
    impl: Impl = "xla",
) -> Float[Array, "rows outputs"]:
    """Return ``x @ matrices[index]``; only that matrix is read. float32 operands are multiplied as such on every
    platform.

    Args:
        index: may be traced.
        rows: how many rows of x, the first ones, are wanted; the others may give 0. None: all.
        out_dtype: by default that of `x`.
        impl: ``cpu`` needs compiled loops and unsharded operands, and leaves what is not float32, or not a whole number
            of vectors wide, to XLA. All others are XLA's.
    """
    dtype = out_dtype or x.dtype
    if impl == "cpu" and cpu.takes(x, matrices[0], dtype):
        return cpu.matmul(x, matrices, index, rows)
    return chosen_product(lambda x, matrix: _product(x, matrix, dtype), x, matrices, index)


def chosen_product(
    product: Callable[[Array, Any], Array], x: Array, matrices: Sequence[Any], index: int | Int[Array, ""]
) -> Array:
    """Return ``product(x, matrices[index])``. Each matrix has its own branch, so that no matrix is copied."""
    if len(matrices) == 1:
        return product(x, matrices[0])
    return jax.lax.switch(index, [lambda x, m=m: product(x, m) for m in matrices], x)


def matmul_table(
    x: Float[Array, "rows inputs"],
    table: Float[Array, "outputs inputs"],
    *,
    rows: Int[Array, ""] | None = None,
    impl: Impl = "xla",
) -> Float[Array, "rows outputs"]:
    """Return ``x @ table.T`` in float32; see `matmul`."""
    if impl == "cpu" and cpu.takes_table(x, table):
        return cpu.matmul_table(x, table, rows)
    if x.shape[0] == 1:
        # As a matrix times a vector: XLA:CPU turns the product of one row into a slow sum along the table's rows.
        return _product(table, x[0], jnp.float32)[None]
    return _product(x, table.T, jnp.float32)


def _product(a: Array, b: Array, dtype: jnp.dtype) -> Array:
    # Accelerators multiply float32 in fewer bits by default.
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=dtype)


ROWS = 8
"""Rows that a matrix multiplies at once where a loop of XLA's does it."""


def matmul_grouped(
    x: Float[Array, "rows inputs"],
    table: Float[Array, "experts inputs outputs"],
    counts: Int[Array, " experts"],
    *,
    impl: Impl = "xla",
) -> Float[Array, "rows outputs"]:
    """Return each row's product with its expert's matrix, in the dtype of `x`; rows of no expert give 0.

    A row's bits do not depend on other rows with ``cpu``.

    Args:
        x: sorted by expert: the first ``counts[0]`` rows are expert 0's.
        impl: ``cpu`` needs compiled loops, ``gpu`` Triton, and both unsharded operands; all others are XLA's.
    """
    if impl == "gpu" and x.size and table.size and multiplies(x.dtype) and reaches(len(x), *table.shape[1:]):
        from pallas_kernels.matmul import gpu_grouped  # imports triton, which only a GPU's environment has

        return gpu_grouped.matmul_grouped(x, table, counts)
    if impl != "cpu":
        precision = jax.lax.Precision.HIGHEST if table.dtype == jnp.float32 else None
        return jax.lax.ragged_dot(x, table, counts.astype(jnp.int32), precision=precision)
    if x.dtype == table.dtype == jnp.float32 and table.shape[2] % LANES == 0:
        shape = jax.ShapeDtypeStruct((len(x), table.shape[2]), jnp.float32)
        call = jax.ffi.ffi_call(target("matmul.cpu_kernel:grouped_target"), shape)
        return call(x, counts.astype(jnp.int32), table)
    return _by_tiles(x, table, counts)


def _by_tiles(
    x: Float[Array, "rows inputs"], table: Float[Array, "experts inputs outputs"], counts: Int[Array, " experts"]
) -> Float[Array, "rows outputs"]:
    """Multiply `ROWS` rows of one expert at a time, in a loop; rows of a tile beyond its expert's are overwritten by
    the next one."""
    rows = len(x)
    tiles = -(-counts // ROWS)
    last_tile, last_row = jnp.cumsum(tiles), jnp.cumsum(counts)
    padded = jnp.pad(x, ((0, ROWS), (0, 0)))

    def multiply(number: Array, out: Array) -> Array:
        expert = jnp.searchsorted(last_tile, number, side="right")
        end = last_row[expert]
        start = end - counts[expert] + (number - (last_tile[expert] - tiles[expert])) * ROWS
        matrix = jax.lax.dynamic_index_in_dim(table, expert, 0, keepdims=False)
        own = jax.lax.dynamic_slice_in_dim(padded, start, ROWS)
        product = jnp.dot(own, matrix, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        is_own = start + jnp.arange(ROWS) < end
        product = jnp.where(is_own[:, None], product, 0).astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, product, start, 0)

    out = jnp.zeros((rows + ROWS, table.shape[2]), x.dtype)
    return jax.lax.fori_loop(0, last_tile[-1], multiply, out)[:rows]
