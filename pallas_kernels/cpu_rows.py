"""Multiplies any number of float32 rows with some vectors of columns, in the largest tiles that the rows fill."""

from __future__ import annotations

from functools import cache
from typing import Any

from pallas_kernels import ffi
from pallas_kernels.cpu_tiles import ROWS, tile


@cache
def remaining_rows(vectors: int) -> Any:
    """Return ``f(x, x_stride, row, rows, w, w_stride, depth, out, out_stride, more)``, to be called from compiled
    loops.

    Rows of x from `row` to `rows` are multiplied; all else is as for `pallas_kernels.cpu_tiles.tile`.
    """
    full, four, two, one = (tile(rows, vectors) for rows in (ROWS, 4, 2, 1))

    @ffi.njit_named(str(vectors))
    def remaining(x, x_stride, row, rows, w, w_stride, depth, out, out_stride, more):
        while rows - row >= ROWS:
            full(x + row * x_stride, x_stride, w, w_stride, depth, out + row * out_stride, out_stride, more, 0, 0)
            row += ROWS
        while rows - row >= 4:
            four(x + row * x_stride, x_stride, w, w_stride, depth, out + row * out_stride, out_stride, more, 0, 0)
            row += 4
        while rows - row >= 2:
            two(x + row * x_stride, x_stride, w, w_stride, depth, out + row * out_stride, out_stride, more, 0, 0)
            row += 2
        if row < rows:
            one(x + row * x_stride, x_stride, w, w_stride, depth, out + row * out_stride, out_stride, more, 0, 0)

    return remaining
