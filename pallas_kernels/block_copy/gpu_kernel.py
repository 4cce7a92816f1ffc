"""Copies some columns of several rows of a matrix to other rows of it, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


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
