"""Implements block_copy as one Triton kernel, in place.

A program owns a range of columns of all blocks and copies it for every pair, all reads before all writes. Programs
share no memory, so chains and swaps of blocks need no order among them.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.block_copy.gpu_kernel import copy_columns
from pallas_kernels.gpu_launch import Launch, Launcher, like, triton_call

PROGRAM_BYTES = 64 * 1024
"""Bytes that a program holds in registers."""
MIN_COLUMN_BYTES, MAX_COLUMN_BYTES = 16, 1024
"""One read of a thread, and two of a warp."""
MAX_PAIRS = PROGRAM_BYTES // MIN_COLUMN_BYTES


def block_copy(
    blocks: Shaped[Array, "blocks ..."],
    src: Int[Array, " pairs"],
    dst: Int[Array, " pairs"],
    *,
    launch: Launcher = triton_call,
) -> Shaped[Array, "blocks ..."]:
    """See `pallas_kernels.block_copy.block_copy`. `blocks` is aliased to the result.

    Raises:
        ValueError: when there are more than `MAX_PAIRS` pairs.
    """
    (pairs,) = src.shape
    if pairs > MAX_PAIRS:
        raise ValueError(f"src has {pairs} pairs, more than {MAX_PAIRS}, which one launch can hold")
    if pairs == 0:
        return blocks
    n, elements = blocks.shape[0], math.prod(blocks.shape[1:])
    rows = 1 << (pairs - 1).bit_length()
    columns = min(MAX_COLUMN_BYTES, PROGRAM_BYTES // rows) // blocks.dtype.itemsize
    copy = Launch(
        copy_columns,
        grid=(-(-elements // columns),),
        out=(like(blocks),),
        aliases={2: 0},
        constants={"BLOCKS": n, "ELEMENTS": elements, "PAIRS": pairs, "ROWS": rows, "COLUMNS": columns},
        num_warps=8,
    )
    (blocks,) = launch(copy, src.astype(jnp.int32), dst.astype(jnp.int32), blocks)
    return blocks
