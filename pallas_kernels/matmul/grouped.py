"""Multiplies rows with matrices of experts: each row with its own only.

XLA on CPUs and GPUs multiplies every row with every expert's matrix and masks (`jax.lax.ragged_dot`; 32 times the work
of 32 experts). `cpu` and `gpu` multiply each row only with its own expert.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu_launch import multiplies
from pallas_kernels.platform import Impl

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
        impl: ``cpu`` needs Numba, ``gpu`` Triton, and both unsharded operands; all others are XLA's.
    """
    if impl == "gpu" and x.size and table.size and multiplies(x.dtype):
        from pallas_kernels.matmul import gpu_grouped  # imports triton, which only a GPU's environment has

        return gpu_grouped.matmul_grouped(x, table, counts)
    if impl != "cpu":
        precision = jax.lax.Precision.HIGHEST if table.dtype == jnp.float32 else None
        return jax.lax.ragged_dot(x, table, counts.astype(jnp.int32), precision=precision)
    from pallas_kernels.cpu_tiles import LANES  # needs Numba

    if x.dtype == table.dtype == jnp.float32 and table.shape[2] % LANES == 0:
        from pallas_kernels.matmul.cpu_grouped import grouped_target

        shape = jax.ShapeDtypeStruct((len(x), table.shape[2]), jnp.float32)
        return jax.ffi.ffi_call(grouped_target(), shape)(x, counts.astype(jnp.int32), table)
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
