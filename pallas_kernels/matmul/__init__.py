"""Multiplies up to some thousand rows with a layer's matrix or the vocabulary's table.

XLA has its own products, and they are right for sharded operands, which a custom call would gather. On a CPU that
holds a model alone, `cpu` reads each matrix once from where it lies: XLA:CPU repacks it for every product, which costs
as much as multiplying a few dozen rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.matmul import cpu
from pallas_kernels.platform import Impl

__all__ = ["chosen_product", "matmul", "matmul_table"]


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
        impl: ``cpu`` needs Numba and unsharded operands, and leaves what is not float32, or not a whole number of
            vectors wide, to XLA. All others are XLA's.
    """
    dtype = out_dtype or x.dtype
    if impl == "cpu" and cpu.takes(x, matrices[0], dtype):
        return cpu.matmul(x, matrices, index, rows)
    return chosen_product(lambda x, matrix: _product(x, matrix, dtype), x, matrices, index)


def chosen_product(
    product: Callable[[Array, Any], Array], x: Array, matrices: Sequence[Any], index: int | Int[Array, ""]
) -> Array:
    """Return ``product(x, matrices[index])``, each in a separate branch, so that choosing copies no matrix."""
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
