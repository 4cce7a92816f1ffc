"""Multiplies rows with matrices of experts, in Triton: a program has some rows of one expert and some columns."""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.gpu_experts import tile_of_program


@triton.jit
def multiply_groups(
    x,
    table,
    counts,
    row_count,
    out,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write the products of x [row_count, INPUTS], sorted by expert, with table [EXPERTS, INPUTS, OUTPUTS] to out.

    Program (p, c) has the p-th tile of rows, see `pallas_kernels.gpu_experts.tile_of_program`, and columns from
    ``c * COLUMNS`` on.
    """
    expert, first_row, end = tile_of_program(counts, row_count, EXPERTS, GROUPS, TILE)
    row = first_row + tl.arange(0, TILE)
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
