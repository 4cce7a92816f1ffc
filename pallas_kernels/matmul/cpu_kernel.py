"""Holds the loops of `pallas_kernels.matmul.cpu`, compiled by Numba: panels of columns, each an item of work.

The first rows of x that meet a panel copy it out of the matrix, where its rows are far apart, into memory that stays
in the cache for the other rows (Goto and van de Geijn, 2008).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from pallas_kernels import ffi
from pallas_kernels.cpu_rows import remaining_rows
from pallas_kernels.cpu_tiles import (
    DOT_ROWS,
    FLOAT,
    LANES,
    LINE_BYTES,
    ROWS,
    TABLE_ROWS,
    VECTORS,
    dots,
    stack_memory,
    tile,
)
from pallas_kernels.ffi import address, argument, data, dimension, result
from pallas_kernels.ffi.primitives import pointer
from pallas_kernels.panelled_floats import PANEL

PANEL_VECTORS = PANEL // LANES
"""Vectors of the columns of a matrix that are an item of work."""
PANELS_OF_ROW = max(1, 12 // PANEL_VECTORS)
"""Panels that one row is multiplied with at once: their sums fill what registers there are at least."""
GRAINS = 2
"""Portions of a thread: few, as a panel is fetched while the panel before it is multiplied."""
DEPTH = 768
"""Rows of a panel at once: 144 KiB, for the second cache, of which AVX-512 packs all and others a part, on the stack of
any thread."""
AHEAD = 8
"""Rows of a matrix that are fetched ahead where x has one row."""
FAR = 4096
"""Bytes between rows of a matrix beyond which a processor fetches nothing ahead by itself: a page of memory."""
PACKED = DEPTH * VECTORS * LANES * FLOAT
"""Bytes of the columns that a tile has."""
FETCHING = 4
"""Tiles of a table's rows with each of which a part of the next rows is fetched."""
PORTION = 8 * TABLE_ROWS
"""Rows of a table that are an item of work."""


@ffi.known_again
def matrices_target() -> str:
    """Return the name of the custom call ``(x [rows, inputs], [index, wanted], matrices [inputs, outputs]...) -> x @
    matrices[index]``.

    Only the first `wanted` rows are multiplied; the others give 0.
    """
    name = "jpaged_matmul"
    ffi.register(name, _multiply, items_of=((2, 1),), portion=PANEL, grains=GRAINS)
    return name


@ffi.known_again
def table_target() -> str:
    """Return the name of the custom call ``(x [rows, inputs], [wanted], table [outputs, inputs]) -> x @ table.T``; see
    above."""
    name = "jpaged_matmul_table"
    ffi.register(name, _multiply_by_table, items_of=((2, 0),), portion=PORTION)
    return name


def _columns_product(vectors: int, lines: int) -> Any:
    """Return the product of all rows of x and so many vectors of columns, as a compiled function. It fetches so many
    lines of every row of what is `coming`."""
    first = tile(ROWS, vectors, pack=True)
    fetching, fetching_all = tile(ROWS, vectors, fetch=1), tile(ROWS, vectors, fetch=lines)
    rest = remaining_rows(vectors)
    packed_stride = vectors * LANES * FLOAT

    @ffi.njit_named(f"columns_{vectors}")
    def product(x, x_stride, rows, panel, stride, depth, out, out_stride, more, packed, coming):
        matrix_stride, row = stride, 0
        if rows > ROWS:
            first(x, x_stride, panel, stride, depth, out, out_stride, more, packed, packed_stride)
            panel, stride, row = packed, packed_stride, ROWS
        # What is read from memory next comes while these rows are multiplied.
        if rows >= (lines + 1) * ROWS:
            for line in range(lines):
                mine, to, theirs = x + row * x_stride, out + row * out_stride, coming + line * LINE_BYTES
                fetching(mine, x_stride, panel, stride, depth, to, out_stride, more, theirs, matrix_stride)
                row += ROWS
        elif rows >= 2 * ROWS or rows == ROWS:
            mine, to = x + row * x_stride, out + row * out_stride
            fetching_all(mine, x_stride, panel, stride, depth, to, out_stride, more, coming, matrix_stride)
            row += ROWS
        rest(x, x_stride, row, rows, panel, stride, depth, out, out_stride, more)

    return product


_BYTES = LANES * FLOAT
_three, _two, _one = (_columns_product(vectors, -(-vectors * _BYTES // LINE_BYTES)) for vectors in (3, 2, 1))


@njit
def multiply_columns(x, x_stride, rows, panel, stride, depth, out, out_stride, more, packed, coming, vectors):
    """Multiply all rows of x with so many vectors of columns, no more than a panel's."""
    while vectors >= VECTORS:
        _three(x, x_stride, rows, panel, stride, depth, out, out_stride, more, packed, coming)
        panel, out, vectors = panel + VECTORS * _BYTES, out + VECTORS * _BYTES, vectors - VECTORS
        coming += VECTORS * _BYTES
    if vectors == 2:
        _two(x, x_stride, rows, panel, stride, depth, out, out_stride, more, packed, coming)
    elif vectors == 1:
        _one(x, x_stride, rows, panel, stride, depth, out, out_stride, more, packed, coming)


_row_by_several, _row_by_1 = (
    tile(1, n * PANEL_VECTORS, fetch=n * PANEL * FLOAT // LINE_BYTES) for n in (PANELS_OF_ROW, 1)
)


@njit
def _multiply_row(x, panel, stride, depth, out, more, panels):
    """Multiply one row with neighbouring panels.

    The matrix is read once, so memory is the limit. It is fastest with long contiguous reads that are prefetched some
    rows ahead.
    """
    while panels >= PANELS_OF_ROW:
        _row_by_several(x, 0, panel, stride, depth, out, 0, more, panel + AHEAD * stride, stride)
        several = PANELS_OF_ROW * PANEL * FLOAT
        panel, out, panels = panel + several, out + several, panels - PANELS_OF_ROW
    while panels > 0:
        _row_by_1(x, 0, panel, stride, depth, out, 0, more, panel + AHEAD * stride, stride)
        panel, out, panels = panel + PANEL * FLOAT, out + PANEL * FLOAT, panels - 1


@njit
def _whole_tile(rows):
    """Return the number of rows to multiply if `rows` are needed.

    For a few rows, one whole tile takes as long as one row, while several smaller tiles would each read the panel
    again, without prefetching.
    """
    if 1 < rows < 2 * ROWS:
        return -(-rows // ROWS) * ROWS
    return rows


@njit
def _clear(out, rows, columns, stride):
    """Zero rows that lie `stride` bytes apart."""
    for row in range(rows):
        numbers = carray(pointer(out + row * stride), (columns,), np.float32)
        for column in range(columns):
            numbers[column] = np.float32(0.0)


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _multiply(frame, begin, end):
    index, wanted = carray(data(argument(frame, 1)), (2,), np.int32)
    first, matrix = argument(frame, 0), argument(frame, 2 + index)
    all_rows, inputs, outputs = dimension(first, 0), dimension(matrix, 0), dimension(matrix, 1)
    wanted = min(wanted, all_rows)
    rows = min(_whole_tile(wanted), all_rows)
    x, x_stride, stride = address(first), inputs * FLOAT, outputs * FLOAT
    packed = stack_memory(PACKED)
    if rows == 1 and stride > FAR:
        panels, offset = max(0, min(end, outputs // PANEL) - begin), begin * PANEL * FLOAT
        for at in range(0, inputs, DEPTH):
            mine, theirs = x + at * FLOAT, address(matrix) + at * stride + offset
            depth, out = min(DEPTH, inputs - at), address(result(frame, 0)) + offset
            _multiply_row(mine, theirs, stride, depth, out, at, panels)
        _clear(address(result(frame, 0)) + stride + offset, all_rows - 1, panels * PANEL, stride)
        begin += panels
    for item in range(begin, end):
        column = item * PANEL
        panel, out = address(matrix) + column * FLOAT, address(result(frame, 0)) + column * FLOAT
        vectors = min(PANEL_VECTORS, (outputs - column) // LANES)
        for at in range(0, inputs, DEPTH):
            depth = min(DEPTH, inputs - at)
            mine, theirs = x + at * FLOAT, panel + at * stride
            if at + depth < inputs:
                coming = theirs + depth * stride
            else:
                coming = panel + (PANEL * FLOAT if item + 1 < end else 0)
            multiply_columns(mine, x_stride, rows, theirs, stride, depth, out, stride, at, packed, coming, vectors)
        _clear(out + wanted * stride, all_rows - wanted, vectors * LANES, stride)


def _dot_products(table_rows: int) -> Any:
    """Return the product of all rows of x and so many rows of a table, as a compiled function. It fetches as many rows
    that are coming: a part of them with each tile, or all with the first one where tiles are few."""
    part = max(1, table_rows // FETCHING)
    several, one = dots(DOT_ROWS, table_rows), dots(1, table_rows)
    fetching, fetching_all = dots(DOT_ROWS, table_rows, fetch=part), dots(DOT_ROWS, table_rows, fetch=table_rows)

    @ffi.njit_named(f"table_{table_rows}")
    def product(x, stride, rows, table, inputs, out, out_stride, coming):
        row, last = 0, coming + table_rows * stride
        if DOT_ROWS <= rows < FETCHING * DOT_ROWS:
            fetching_all(x, stride, table, stride, inputs, out, out_stride, 0, coming)
            row = DOT_ROWS
        while rows - row >= DOT_ROWS:
            mine, to = x + row * stride, out + row * out_stride
            if rows >= FETCHING * DOT_ROWS and coming < last:
                fetching(mine, stride, table, stride, inputs, to, out_stride, 0, coming)
                coming += part * stride
            else:
                several(mine, stride, table, stride, inputs, to, out_stride, 0, coming)
            row += DOT_ROWS
        while row < rows:
            one(x + row * stride, stride, table, stride, inputs, out + row * out_stride, out_stride, 0, coming)
            row += 1

    return product


_several_dots, _single_dots = _dot_products(TABLE_ROWS), _dot_products(1)


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _multiply_by_table(frame, begin, end):
    first, second = argument(frame, 0), argument(frame, 2)
    all_rows, outputs, inputs = dimension(first, 0), dimension(second, 0), dimension(second, 1)
    rows = min(carray(data(argument(frame, 1)), (1,), np.int32)[0], all_rows)
    x, table, out = address(first), address(second), address(result(frame, 0))
    stride, out_stride = inputs * FLOAT, outputs * FLOAT
    at, stop = begin * PORTION, min(end * PORTION, outputs)
    _clear(out + rows * out_stride + at * FLOAT, all_rows - rows, stop - at, out_stride)
    while stop - at >= TABLE_ROWS:
        mine = table + at * stride
        _several_dots(x, stride, rows, mine, inputs, out + at * FLOAT, out_stride, mine + TABLE_ROWS * stride)
        at += TABLE_ROWS
    while at < stop:
        mine = table + at * stride
        _single_dots(x, stride, rows, mine, inputs, out + at * FLOAT, out_stride, mine + stride)
        at += 1
