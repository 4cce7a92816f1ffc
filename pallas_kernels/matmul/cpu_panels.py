"""Holds the loops that multiply float32 rows with matrices in panels, compiled by Numba.

Every sum is added up in the order of `pallas_kernels.matmul.cpu_kernel`, so that results have the bits that an array
would give.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from pallas_kernels import ffi
from pallas_kernels.cpu_rows import remaining_rows
from pallas_kernels.cpu_tiles import FLOAT, LANES, LINE_BYTES, ROWS, VECTORS, tile
from pallas_kernels.ffi import address, argument, data, dimension, result
from pallas_kernels.matmul.cpu_kernel import DEPTH, PANEL_VECTORS, _clear, _whole_tile
from pallas_kernels.panelled_floats import PANEL

ROW_BYTES = PANEL * FLOAT
"""Bytes from one input's numbers to the next input's."""
LINES = ROW_BYTES // LINE_BYTES
GRAINS = 4
"""Portions of a thread."""
AHEAD = 16
"""Inputs whose numbers are fetched ahead where x has one row."""
ROWS_AT_ONCE = 2048
"""Rows of x that meet all panels of a portion before the next ones do."""


@ffi.known_again
def panels_target() -> str:
    """Return the name of the custom call ``(x [rows, inputs], [index, wanted], matrices [panels, inputs, 48]...) -> x @
    matrices[index]``, [rows, outputs] of float32.

    Only the first `wanted` rows are multiplied; the others give 0.
    """
    name = "jpaged_matmul_panels"
    ffi.register(name, _multiply, items_of=((2, 0),), grains=GRAINS)
    return name


def _columns_product(vectors: int, groups: int) -> Any:
    """Return the product of all rows of x and so many groups of vectors of a panel's columns, as a compiled function. A
    group's first tile fetches its part of each row of what is `coming`."""
    group_bytes = vectors * LANES * FLOAT
    first = tile(ROWS, vectors, fetch=-(-group_bytes // LINE_BYTES))
    rest = remaining_rows(vectors)

    @ffi.njit_named(f"panel_{vectors}")
    def product(x, x_stride, rows, panel, depth, out, stride, more, coming):
        for group in range(groups):
            row, w, to, theirs = 0, panel + group * group_bytes, out + group * group_bytes, coming + group * group_bytes
            if rows >= ROWS:
                first(x, x_stride, w, ROW_BYTES, depth, to, stride, more, theirs, ROW_BYTES)
                row = ROWS
            rest(x, x_stride, row, rows, w, ROW_BYTES, depth, to, stride, more)

    return product


_whole_panel, _one_vector = _columns_product(VECTORS, PANEL_VECTORS // VECTORS), _columns_product(1, 1)
_row_by_panel = tile(1, PANEL_VECTORS, fetch=LINES)


@njit
def _by_panel(x, x_stride, rows, panel, depth, out, stride, more, vectors):
    """Multiply all rows of x with a panel's first vectors of columns."""
    coming = panel + depth * ROW_BYTES
    if vectors < PANEL_VECTORS:
        for vector in range(vectors):
            place = vector * LANES * FLOAT
            _one_vector(x, x_stride, rows, panel + place, depth, out + place, stride, more, coming)
    elif rows == 1:
        _row_by_panel(x, x_stride, panel, ROW_BYTES, depth, out, stride, more, panel + AHEAD * ROW_BYTES, ROW_BYTES)
    else:
        _whole_panel(x, x_stride, rows, panel, depth, out, stride, more, coming)


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _multiply(frame, begin, end):
    index, wanted = carray(data(argument(frame, 1)), (2,), np.int32)
    first, matrix, to = argument(frame, 0), argument(frame, 2 + index), result(frame, 0)
    all_rows, inputs, outputs = dimension(first, 0), dimension(first, 1), dimension(to, 1)
    wanted = min(wanted, all_rows)
    live = min(_whole_tile(wanted), all_rows)
    x_stride, stride = inputs * FLOAT, outputs * FLOAT
    for row in range(0, live, ROWS_AT_ONCE):
        x, rows = address(first) + row * x_stride, min(ROWS_AT_ONCE, live - row)
        for item in range(begin, end):
            panel, out = address(matrix) + item * inputs * ROW_BYTES, address(to) + row * stride + item * ROW_BYTES
            vectors = min(PANEL_VECTORS, (outputs - item * PANEL) // LANES)
            for at in range(0, inputs, DEPTH):
                mine, theirs, depth = x + at * FLOAT, panel + at * ROW_BYTES, min(DEPTH, inputs - at)
                _by_panel(mine, x_stride, rows, theirs, depth, out, stride, at, vectors)
    column, stop = begin * PANEL, min(end * PANEL, outputs)
    _clear(address(to) + wanted * stride + column * FLOAT, all_rows - wanted, stop - column, stride)
