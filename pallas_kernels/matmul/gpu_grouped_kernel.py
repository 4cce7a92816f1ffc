"""Multiplies rows with matrices of experts, in Triton: a program has some rows of one expert and some columns."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply_groups(
    x,
    table,
    counts,
    out,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write the products of x [ROWS, INPUTS], sorted by expert, with table [EXPERTS, INPUTS, OUTPUTS] to out.

    Program (p, c) has the p-th tile of rows, counted over all experts, and columns from ``c * COLUMNS`` on. Rows of no
    expert are a group of their own behind the last expert, whose products are 0. `GROUPS`: a power of two above
    EXPERTS.
    """
    number = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    count = tl.load(counts + group, mask=group < EXPERTS, other=0)
    count = tl.where(group == EXPERTS, ROWS - tl.sum(count, 0), count)
    tiles = (count + TILE - 1) // TILE
    last_tile = tl.cumsum(tiles, 0)
    expert = tl.sum((last_tile <= number).to(tl.int32), 0)  # GROUPS where the tiles are fewer than the programs
    mine = group == expert
    first_row = tl.sum(tl.where(mine, tl.cumsum(count, 0) - count, 0), 0)
    first_tile = tl.sum(tl.where(mine, last_tile - tiles, 0), 0)
    end = first_row + tl.sum(tl.where(mine, count, 0), 0)
    row = first_row + (number - first_tile) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_mine, exists = (row < end)[:, None], (column < OUTPUTS)[None]
    total = tl.zeros((TILE, COLUMNS), tl.float32)
    if expert < EXPERTS:
        matrix = table + expert.to(tl.int64) * (INPUTS * OUTPUTS)
        for start in range(0, INPUTS, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            left = tl.load(x + row[:, None] * INPUTS + depth[None], mask=is_mine & (depth < INPUTS)[None], other=0)
            right = tl.load(
                matrix + depth[:, None] * OUTPUTS + column[None], mask=(depth < INPUTS)[:, None] & exists, other=0
            )
            total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(out + row[:, None] * OUTPUTS + column[None], total.to(out.dtype.element_ty), mask=is_mine & exists)
