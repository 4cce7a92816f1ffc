"""Multiplies float32 rows and matrices on CPUs, by loops that Numba compiles and XLA calls on its own threads."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu_features import LANES
from pallas_kernels.custom_calls import target
from pallas_kernels.panelled_floats import PanelledFloats

MOST_ROWS_OF_X = 2048
"""The most rows with which x, read once a panel, stays in the cache."""
TABLE_ROWS_OF_X = 2, 64
"""Least and most rows of x to multiply with a table here; XLA is faster with one row and with many."""


def takes(x: jax.Array, matrix: jax.Array, out_dtype: jnp.dtype) -> bool:
    """Tell whether `matmul` does this product: float32, columns in whole vectors, up to `MOST_ROWS_OF_X`."""
    fits = x.shape[0] <= MOST_ROWS_OF_X and matrix.shape[1] % LANES == 0
    return fits and x.dtype == matrix.dtype == out_dtype == jnp.float32


def takes_table(x: jax.Array, table: jax.Array) -> bool:
    """Tell whether `matmul_table` does this product: float32, rows in whole vectors, `TABLE_ROWS_OF_X`."""
    least, most = TABLE_ROWS_OF_X
    return least <= x.shape[0] <= most and takes(x, table, jnp.dtype(jnp.float32))


def matmul(
    x: Float[Array, "rows inputs"],
    matrices: Sequence[Float[Array, "inputs outputs"]],
    index: int | Int[Array, ""],
    rows: Int[Array, ""] | None = None,
) -> Float[Array, "rows outputs"]:
    """See `pallas_kernels.matmul.matmul`."""
    shape = jax.ShapeDtypeStruct((x.shape[0], matrices[0].shape[1]), jnp.float32)
    index_and_rows = jnp.asarray([index, x.shape[0] if rows is None else rows], jnp.int32)
    return jax.ffi.ffi_call(target("matmul.cpu_kernel:matrices_target"), shape)(x, index_and_rows, *matrices)


def matmul_panels(
    x: Float[Array, "rows inputs"],
    matrices: Sequence[PanelledFloats],
    index: int | Int[Array, ""],
    rows: Int[Array, ""] | None = None,
) -> Float[Array, "rows outputs"]:
    """Return ``x @ matrices[index]`` with the bits of `matmul`; needs unsharded operands.

    Args:
        matrices: of one shape.
        rows: how many rows of x, the first ones, are wanted; the others give 0. None: all.
    """
    shape = jax.ShapeDtypeStruct((x.shape[0], matrices[0].outputs), jnp.float32)
    index_and_rows = jnp.asarray([index, x.shape[0] if rows is None else rows], jnp.int32)
    numbers = [matrix.numbers for matrix in matrices]
    call = jax.ffi.ffi_call(target("matmul.cpu_kernel:panels_target"), shape)
    return call(x.astype(jnp.float32), index_and_rows, *numbers)


def matmul_table(
    x: Float[Array, "rows inputs"], table: Float[Array, "outputs inputs"], rows: Int[Array, ""] | None = None
) -> Float[Array, "rows outputs"]:
    """See `pallas_kernels.matmul.matmul_table`."""
    shape = jax.ShapeDtypeStruct((x.shape[0], table.shape[0]), jnp.float32)
    wanted = jnp.asarray([x.shape[0] if rows is None else rows], jnp.int32)
    return jax.ffi.ffi_call(target("matmul.cpu_kernel:table_target"), shape)(x, wanted, table)
