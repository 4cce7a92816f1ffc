"""Implements block_copy as one Triton kernel, in place.

Memory. `blocks` is one matrix in global memory, [BLOCKS, ELEMENTS], a row for each block, and is donated. A program
owns COLUMNS of its columns and holds them for all pairs in registers, [ROWS, COLUMNS], 64 KiB at most.

    pairs (src -> dst)      columns of program p
    0:  4 -> 7              |####|  loads all rows `src`
    1:  7 -> 2              |####|  barrier
    2:  2 -> 4              |####|  stores all rows `dst`

Loops. There are none: the grid is (columns / COLUMNS). A program reads for every pair before it writes for any, and
programs share no memory. So chains and swaps of blocks need no order among them.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Int, Shaped

from pallas_kernels.gpu_launch import Launch, Launcher, like, triton_call


@triton.jit
def copy_columns(
    src,
    dst,
    blocks,
    blocks_again,
    BLOCKS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy columns of rows of `blocks`, [BLOCKS, ELEMENTS]: program p takes columns ``p * COLUMNS`` on; ROWS is PAIRS
    up to a power of two."""
    pair = tl.arange(0, ROWS)
    read = tl.load(src + pair, mask=pair < PAIRS, other=-1).to(tl.int64)
    write = tl.load(dst + pair, mask=pair < PAIRS, other=-1).to(tl.int64)
    live = (read >= 0) & (read < BLOCKS) & (write >= 0) & (write < BLOCKS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = live[:, None] & (column < ELEMENTS)[None, :]
    copied = tl.load(blocks + read[:, None] * ELEMENTS + column[None, :], mask=mask)
    tl.debug_barrier()  # a block that one thread overwrites may be another's source
    tl.store(blocks + write[:, None] * ELEMENTS + column[None, :], copied, mask=mask)


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
