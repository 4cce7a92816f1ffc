"""Finds a program's expert and rows, in Triton, where rows sorted by expert are cut into tiles."""

from __future__ import annotations

import triton
import triton.language as tl


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
