"""Holds the loops of `pallas_kernels.matmul` on CPUs, compiled by Numba: panels of columns, each an item of work.

Memory. Everything is float32 and read where it lies: x [rows, inputs], matrices [inputs, outputs] or tables [outputs,
inputs]. A panel is `PANEL` columns. In an array its rows lie far apart, so the first rows of x that meet it copy it
out, `DEPTH` inputs at a time, to the stack, where it stays in the second cache for the other rows (Goto and van de
Geijn, 2008). A `PanelledFloats` has each panel as one run of memory, [panels, inputs, 48], and needs no copy.

                 outputs
             +----+----+----+
      inputs | p0 | p1 | p2 |  DEPTH rows of a panel meet all rows of x,
             |    |    |    |  then the next DEPTH rows
             +----+----+----+

Loops, from outside: panels (items that XLA's threads share; of experts, all experts' panels, one expert after another);
`DEPTH` inputs; rows of x, in tiles of `ROWS`; inside a tile the inputs, with every sum in a register. While a panel is
multiplied, the next one is prefetched.

Every sum is added up in the same order for arrays, panels and experts, whatever the other rows are: a row has the same
bits in all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from pallas_kernels import ffi
from pallas_kernels.cpu_panels import GRAINS_OF_EXPERTS, rows_of_expert
from pallas_kernels.cpu_tiles import (
    DOT_ROWS,
    FLOAT,
    LANES,
    LINE_BYTES,
    ROWS,
    TABLE_ROWS,
    VECTORS,
    dots,
    remaining_rows,
    stack_memory,
    tile,
)
from pallas_kernels.ffi import address, argument, data, dimension, result
from pallas_kernels.ffi.loops import njit
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

    @njit
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

    @njit
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


ROW_BYTES = PANEL * FLOAT
"""Bytes from one input's numbers to the next input's."""
LINES = ROW_BYTES // LINE_BYTES
GRAINS_OF_PANELS = 4
"""Portions of a thread."""
PANEL_AHEAD = 16
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
    ffi.register(name, _multiply_panels, items_of=((2, 0),), grains=GRAINS_OF_PANELS)
    return name


def _panel_product(vectors: int, groups: int) -> Any:
    """Return the product of all rows of x and so many groups of vectors of a panel's columns, as a compiled function. A
    group's first tile fetches its part of each row of what is `coming`."""
    group_bytes = vectors * LANES * FLOAT
    first = tile(ROWS, vectors, fetch=-(-group_bytes // LINE_BYTES))
    rest = remaining_rows(vectors)

    @njit
    def product(x, x_stride, rows, panel, depth, out, stride, more, coming):
        for group in range(groups):
            row, w, to, theirs = 0, panel + group * group_bytes, out + group * group_bytes, coming + group * group_bytes
            if rows >= ROWS:
                first(x, x_stride, w, ROW_BYTES, depth, to, stride, more, theirs, ROW_BYTES)
                row = ROWS
            rest(x, x_stride, row, rows, w, ROW_BYTES, depth, to, stride, more)

    return product


_whole_panel, _one_vector = _panel_product(VECTORS, PANEL_VECTORS // VECTORS), _panel_product(1, 1)
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
        _row_by_panel(
            x, x_stride, panel, ROW_BYTES, depth, out, stride, more, panel + PANEL_AHEAD * ROW_BYTES, ROW_BYTES
        )
    else:
        _whole_panel(x, x_stride, rows, panel, depth, out, stride, more, coming)


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _multiply_panels(frame, begin, end):
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


@ffi.known_again
def grouped_target() -> str:
    """Return the name of the custom call ``(x [rows, inputs], counts [experts], table [experts, inputs, outputs]) ->
    each row times its expert's matrix``, rows of no expert 0."""
    name = "jpaged_matmul_grouped"
    ffi.register(name, _multiply_grouped, items_of=((2, 0), (2, 2)), portion=LANES, grains=GRAINS_OF_EXPERTS)
    return name


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _multiply_grouped(frame, begin, end):
    first, table = argument(frame, 0), argument(frame, 2)
    rows, experts, inputs, outputs = dimension(first, 0), dimension(table, 0), dimension(table, 1), dimension(table, 2)
    counts = carray(data(argument(frame, 1)), (experts,), np.int32)
    x_stride, stride = inputs * FLOAT, outputs * FLOAT
    packed = stack_memory(PACKED)
    row, seen = 0, 0
    for item in range(begin, end):
        expert, column = item * LANES // outputs, item * LANES % outputs
        if column % PANEL:
            continue
        row, number = rows_of_expert(counts, expert, rows, seen, row)
        seen = expert
        out = address(result(frame, 0)) + column * FLOAT
        vectors = min(PANEL_VECTORS, (outputs - column) // LANES)
        if expert + 1 == experts:
            after = row + counts[expert]
            _clear(out + after * stride, rows - after, vectors * LANES, stride)
        if number == 0:
            continue
        x, panel, to = address(first) + row * x_stride, address(table) + expert * inputs * stride, out + row * stride
        panel += column * FLOAT
        for at in range(0, inputs, DEPTH):
            depth = min(DEPTH, inputs - at)
            mine, theirs = x + at * FLOAT, panel + at * stride
            coming = theirs + (depth * stride if at + depth < inputs else PANEL * FLOAT)
            multiply_columns(mine, x_stride, number, theirs, stride, depth, to, stride, at, packed, coming, vectors)
