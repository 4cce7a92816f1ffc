"""Multiplies matrices of a unit's tokens and states, in loops that Numba compiles around the tiles of
`pallas_kernels.cpu_tiles`.

Addresses and strides are in bytes. Arrays have at most `UNIT` tokens along each axis of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from pallas_kernels.cpu_math import FAST, exp, f32
from pallas_kernels.cpu_tiles import DOT_ROWS, FLOAT, LANES, ROWS, TABLE_ROWS, dots, tile
from pallas_kernels.ffi.loops import njit
from pallas_kernels.ffi.primitives import pointer
from pallas_kernels.recurrent.layout import UNIT


class Scratch(NamedTuple):
    """Holds the intermediate arrays of a piece's products, for up to `UNIT` tokens."""

    logs: np.ndarray  # [UNIT], float64
    overlaps: np.ndarray  # [UNIT, UNIT]
    weights: np.ndarray  # [UNIT, UNIT]
    turned: np.ndarray  # [rows of the state, UNIT]
    values: np.ndarray  # [UNIT, width of a head]


@njit
def floats(at, rows, columns):
    """Return the float32 at an address as a matrix."""
    return carray(pointer(at), (rows, columns), np.float32)


@njit
def scratch_bytes(size, width):
    """Return the bytes that `scratch_at` needs."""
    return UNIT * (2 + 2 * UNIT + size + width) * FLOAT


@njit
def scratch_at(at, size, width):
    """Lay out the scratch of states of `size` rows and heads of `width` columns in memory that begins at an address."""
    overlaps = at + 2 * UNIT * FLOAT
    weights = overlaps + UNIT * UNIT * FLOAT
    turned = weights + UNIT * UNIT * FLOAT
    values = turned + size * UNIT * FLOAT
    return Scratch(
        carray(pointer(at), (UNIT,), np.float64),
        floats(overlaps, UNIT, UNIT),
        floats(weights, UNIT, UNIT),
        floats(turned, size, UNIT),
        floats(values, UNIT, width),
    )


def _column_of_tiles(vectors):
    """Return a compiled product whose result is `vectors` vectors wide."""
    eight, one = tile(ROWS, vectors), tile(1, vectors)

    @njit
    def column(x, x_stride, rows, w, w_stride, depth, out, out_stride, more):
        row = 0
        while rows - row >= ROWS:
            eight(x + row * x_stride, x_stride, w, w_stride, depth, out + row * out_stride, out_stride, more, 0, 0)
            row += ROWS
        while row < rows:
            one(x + row * x_stride, x_stride, w, w_stride, depth, out + row * out_stride, out_stride, more, 0, 0)
            row += 1

    return column


_two, _one = (_column_of_tiles(vectors) for vectors in (2, 1))


@njit
def multiply(x, x_stride, rows, w, w_stride, depth, out, out_stride, width, more):
    """Write x [rows, depth] @ w [depth, width] to `out`, or with `more` add it; depth is at least 1, and width a
    multiple of `LANES`."""
    vectors, at = width // LANES, 0
    while vectors >= 2:
        _two(x, x_stride, rows, w + at, w_stride, depth, out + at, out_stride, more)
        vectors -= 2
        at += 2 * LANES * FLOAT
    if vectors == 1:
        _one(x, x_stride, rows, w + at, w_stride, depth, out + at, out_stride, more)


_many_dots, _dot = dots(DOT_ROWS, TABLE_ROWS), dots(1, 1)


@njit
def multiply_earlier(x, x_stride, table, table_stride, rows, depth, out, out_stride):
    """Write the dot products of each row of x with the rows of a table up to the same index to `out`.

    Some products with later rows are written too, as tiles reach beyond the diagonal. Depth is a multiple of `LANES`.
    """
    row = 0
    while row < rows:
        here = min(DOT_ROWS, rows - row)
        mine, to = x + row * x_stride, out + row * out_stride
        other = 0
        while other < row + here:
            theirs, place = table + other * table_stride, to + other * FLOAT
            if here == DOT_ROWS and rows - other >= TABLE_ROWS:
                _many_dots(mine, x_stride, theirs, table_stride, depth, place, out_stride, 0, 0)
                other += TABLE_ROWS
            else:
                for each in range(here):
                    _dot(
                        mine + each * x_stride,
                        x_stride,
                        theirs,
                        table_stride,
                        depth,
                        place + each * out_stride,
                        0,
                        0,
                        0,
                    )
                other += 1
        row += here


@njit
def multiply_lower(weights, length, w, w_stride, out, out_stride, width):
    """Add the product of weights [length, length], 0 above the diagonal, with w to `out`.

    A tile of rows is multiplied only up to its last row's diagonal, which skips nearly half of the products.
    """
    for row in range(0, length, ROWS):
        here = min(ROWS, length - row)
        mine, to = weights.ctypes.data + row * UNIT * FLOAT, out + row * out_stride
        multiply(mine, UNIT * FLOAT, here, w, w_stride, row + here, to, out_stride, width, 1)


@njit
def row_at(array, row, column):
    """Return the address of an element of a contiguous array."""
    return array.ctypes.data + (row * array.shape[1] + column) * FLOAT


@njit
def stride_of(array):
    """Return the bytes from one row to the next."""
    return array.shape[1] * FLOAT


@njit(fastmath=FAST)
def fade(weights, overlaps, logs, length):
    """Multiply overlaps [token, earlier token] by the decay between the two; later tokens get 0."""
    for token in range(length):
        row, of = weights[token], overlaps[token]
        for other in range(token + 1):
            row[other] = of[other] * exp(f32(logs[token] - logs[other]))
        for other in range(token + 1, UNIT):
            row[other] = f32(0.0)


@njit(fastmath=FAST)
def scale(array, rows, width, factor):
    """Multiply the first rows and columns of an array by a number."""
    for n in range(rows):
        row = array[n]
        for i in range(width):
            row[i] *= factor
