"""Holds the loops of `pallas_kernels.rotated_heads.cpu`, compiled by Numba.

Memory. All arrays are read and written in place, once; a head of a token is one run of memory, and its pairs' partners
lie half a head apart, so both halves are vectors. Loops. A few tokens are an item of work; inside, KV heads, then the
queries, the key and the value of each.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from pallas_kernels import ffi
from pallas_kernels.cpu_math import copy
from pallas_kernels.ffi import argument, data, dimension, result
from pallas_kernels.ffi.loops import njit
from pallas_kernels.row_ops.cpu_kernel import LOOSE, ROWS, inverse_size, register, row_at


@ffi.known_again
def target() -> str:
    """Return the name of the custom call (joined ``[tokens, heads, rows, head_dim]``, cos, sin ``[tokens, half]``) ->
    (turned queries ``[tokens, heads, rows - 2, head_dim]``, turned keys and values ``[tokens, heads, head_dim]``)."""
    return register("jpaged_rotated_heads", _rotate)


@ffi.known_again
def normed_target() -> str:
    """Return the name of the custom call that takes the norms' factors ``[2, head_dim]`` and epsilon ``[1]`` too."""
    return register("jpaged_normed_rotated_heads", _norm_and_rotate)


@njit(fastmath=LOOSE)
def _turn(x, cos, sin, out):
    half = cos.size
    for pair in range(half):
        left, right = x[pair], x[half + pair]
        out[pair] = left * cos[pair] - right * sin[pair]
        out[half + pair] = right * cos[pair] + left * sin[pair]
    for lane in range(2 * half, x.size):
        out[lane] = x[lane]


@njit(fastmath=LOOSE)
def _norm_and_turn(x, root, factors, cos, sin, out):
    half = cos.size
    for pair in range(half):
        left, right = x[pair] * root * factors[pair], x[half + pair] * root * factors[half + pair]
        out[pair] = left * cos[pair] - right * sin[pair]
        out[half + pair] = right * cos[pair] + left * sin[pair]
    for lane in range(2 * half, x.size):
        out[lane] = x[lane] * root * factors[lane]


@njit
def _sizes(frame):
    """Return a call's tokens, KV heads, rows of each, lanes and pairs."""
    joined, angles = argument(frame, 0), argument(frame, 1)
    shape = dimension(joined, 0), dimension(joined, 1), dimension(joined, 2), dimension(joined, 3)
    return (*shape, dimension(angles, 1))


@njit
def _place(frame, head, row, rows, width):
    """Return where a row of a head is put: its queries in the first result, its key and its value in the others."""
    if row < rows - 2:
        return row_at(result(frame, 0), head * (rows - 2) + row, width)
    return row_at(result(frame, row - rows + 3), head, width)


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _rotate(frame, begin, end):
    joined, (tokens, heads, rows, width, half) = argument(frame, 0), _sizes(frame)
    for token in range(begin * ROWS, min(end * ROWS, tokens)):
        cos, sin = row_at(argument(frame, 1), token, half), row_at(argument(frame, 2), token, half)
        for head in range(token * heads, (token + 1) * heads):
            for row in range(rows - 1):
                x = row_at(joined, head * rows + row, width)
                _turn(x, cos, sin, _place(frame, head, row, rows, width))
            copy(row_at(joined, (head + 1) * rows - 1, width), _place(frame, head, rows - 1, rows, width))


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _norm_and_rotate(frame, begin, end):
    joined, (tokens, heads, rows, width, half) = argument(frame, 0), _sizes(frame)
    (eps,) = carray(data(argument(frame, 4)), (1,), np.float32)
    for token in range(begin * ROWS, min(end * ROWS, tokens)):
        cos, sin = row_at(argument(frame, 1), token, half), row_at(argument(frame, 2), token, half)
        for head in range(token * heads, (token + 1) * heads):
            for row in range(rows - 1):
                x = row_at(joined, head * rows + row, width)
                factors = row_at(argument(frame, 3), 1 if row == rows - 2 else 0, width)
                _norm_and_turn(x, inverse_size(x, eps), factors, cos, sin, _place(frame, head, row, rows, width))
            copy(row_at(joined, (head + 1) * rows - 1, width), _place(frame, head, rows - 1, rows, width))
