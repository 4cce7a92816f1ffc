"""Multiplies rows with codes of experts, in Triton: a program has some rows of one expert and some columns.

Memory and loops are those of `gpu_kernel`, without shares of the inputs. The grid has enough tiles of rows for any
distribution of rows over experts, as the host does not know the counts; programs after the last tile have no rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.gpu_experts import tile_of_program
from pallas_kernels.quantised_matmul.gpu_kernel import product_of_steps


@triton.jit
def multiply_code_groups(
    x,
    sums,
    codes,
    scales,
    minimums,
    row_count,
    counts,
    out,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURN: tl.constexpr,
    GROUPED: tl.constexpr,
    PACKED: tl.constexpr,
    E2M1: tl.constexpr,
    FLOAT8: tl.constexpr,
    MINIMUMS: tl.constexpr,
):
    """Write the products of x [rows, INPUTS], sorted by expert, with [EXPERTS, INPUTS, OUTPUTS] codes to out.

    Program (p, c) has the p-th tile of rows, see `pallas_kernels.gpu_experts.tile_of_program`, and columns from
    ``c * COLUMNS`` on. The other arguments are those of `pallas_kernels.quantised_matmul.gpu_kernel.product_of_steps`.
    """
    LINES: tl.constexpr = DEPTH // 2 if PACKED else DEPTH
    STEPS: tl.constexpr = INPUTS // DEPTH
    SCALES: tl.constexpr = STEPS * OUTPUTS if GROUPED else OUTPUTS
    expert, first_row, end = tile_of_program(counts, row_count, EXPERTS, GROUPS, TILE)
    row = first_row + tl.arange(0, TILE)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.arange(0, LINES)
    is_row, is_column = row < end, column < OUTPUTS
    total = tl.zeros((TILE, COLUMNS), tl.float32)
    if expert < EXPERTS:
        own = expert.to(tl.int64)
        total = product_of_steps(
            x + row[:, None] * INPUTS + line[None, :],
            sums + row * STEPS,
            codes + own * (STEPS * LINES * OUTPUTS) + line[:, None] * OUTPUTS + column[None, :],
            scales + own * SCALES + column,
            minimums + own * SCALES + column,
            is_row,
            is_column,
            0,
            STEPS,
            DEPTH,
            OUTPUTS,
            OUTPUTS,
            TILE,
            COLUMNS,
            TURN,
            GROUPED,
            PACKED,
            E2M1,
            FLOAT8,
            MINIMUMS,
        )
    at = out + row[:, None] * OUTPUTS + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
