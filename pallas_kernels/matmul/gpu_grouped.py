"""Implements matmul_grouped as one Triton kernel: each row meets its own expert's matrix only.

XLA multiplies every row with every expert's matrix, of rows that it has masked and copied once for each expert.

Memory. Rows, sorted by expert, and matrices lie in global memory. A step brings a tile of each, [TILE, DEPTH] and
[DEPTH, COLUMNS], through shared memory (three on their way) to the matrix units; the sum, [TILE, COLUMNS] in float32,
stays in registers.

    rows      a a a a a b b c c c c c c c . .       TILE = 4; '.' has no expert, its product is 0
    tiles    |---0---|1|-2-|---3---|--4--|-5-|      a tile has rows of one expert only

Loops. The grid is (tiles of rows, columns / COLUMNS), a program walks over the inputs. The host does not know the
counts when it launches: the grid has as many tiles as the worst distribution needs, and each program finds its tile by
a cumulative sum over the experts. Programs after the last tile have no rows. Nothing is donated.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu_launch import Launch, Launcher, has_matrix_units, triton_call


@triton.jit
def tile_of_program(counts, row_count, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Return the expert and the first row of the tile of program ``p = tl.program_id(0)``, and where the expert's rows
    end.

    Tiles are counted over all experts; a tile has rows of one expert only. Rows of no expert, whose products are 0,
    form a group after the last expert, with the number EXPERTS. Programs after the last tile get the number GROUPS
    and no rows.

    Args:
        counts: pointer to the rows of each expert, [EXPERTS] int32.
        row_count: number of rows.
        GROUPS: a power of two above EXPERTS.
    """
    number = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    count = tl.load(counts + group, mask=group < EXPERTS, other=0)
    count = tl.where(group == EXPERTS, row_count - tl.sum(count, 0), count)
    tiles = (count + TILE - 1) // TILE
    last_tile = tl.cumsum(tiles, 0)
    expert = tl.sum((last_tile <= number).to(tl.int32), 0)
    mine = group == expert
    first_row = tl.sum(tl.where(mine, tl.cumsum(count, 0) - count, 0), 0)
    first_tile = tl.sum(tl.where(mine, last_tile - tiles, 0), 0)
    end = first_row + tl.sum(tl.where(mine, count, 0), 0)
    return expert, first_row + (number - first_tile) * TILE, end


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

    Program (p, c) has the p-th tile of rows, see `pallas_kernels.matmul.gpu_grouped.tile_of_program`, and columns from
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
    """See `pallas_kernels.matmul.matmul_grouped`; operands are not sharded."""
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
