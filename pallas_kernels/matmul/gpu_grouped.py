"""Implements matmul_grouped as one Triton kernel: each row meets its own expert's matrix only.

XLA multiplies every row with every expert's matrix, of rows that it has masked and copied once for each expert.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu_launch import Launch, Launcher, has_matrix_units, triton_call
from pallas_kernels.matmul.gpu_grouped_kernel import multiply_groups

MOST_ROWS = 64
"""Rows of a tile; fewer where experts have fewer, but never less than a matrix unit takes."""
LEAST_ROWS = 16
COLUMNS = 128
DEPTH_BYTES = 128
"""Bytes of a row of `x` that a turn of the loop takes: with three stages a program uses 72 KiB of shared memory."""
ONE_BY_ONE = (16, 64, 16)
"""Rows, columns and inputs where Triton has no matrix units: a thread holds what it multiplies."""


def matmul_grouped(
    x: Float[Array, "rows inputs"],
    table: Float[Array, "experts inputs outputs"],
    counts: Int[Array, " experts"],
    *,
    launch: Launcher = triton_call,
) -> Float[Array, "rows outputs"]:
    """See `pallas_kernels.matmul.grouped.matmul_grouped`; operands are not sharded."""
    rows, inputs = x.shape
    experts, _, outputs = table.shape
    tile, columns, depth = LEAST_ROWS, COLUMNS, DEPTH_BYTES // x.dtype.itemsize
    while tile < MOST_ROWS and tile * experts < rows:
        tile *= 2
    if not has_matrix_units():
        tile, columns, depth = ONE_BY_ONE
    product = Launch(
        multiply_groups,
        grid=(rows // tile + min(experts + 1, rows), -(-outputs // columns)),
        out=(jax.ShapeDtypeStruct((rows, outputs), x.dtype),),
        constants={
            "INPUTS": inputs,
            "OUTPUTS": outputs,
            "EXPERTS": experts,
            "GROUPS": 1 << experts.bit_length(),
            "TILE": tile,
            "COLUMNS": columns,
            "DEPTH": depth,
        },
        num_warps=4,
        num_stages=3,
    )
    (out,) = launch(product, x, table.astype(x.dtype), counts.astype(jnp.int32), rows)
    return out
