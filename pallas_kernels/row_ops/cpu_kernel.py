"""Holds the loops of `pallas_kernels.row_ops.cpu`, compiled by Numba: a few rows are an item of work.

Memory. Arrays are read where they lie, a row after another. A row of a layer stays in the first-level cache from the
sum of its squares to its scaling. A row of a vocabulary, some hundred KB, is read from memory once; for its second pass
it lies in the second cache. `add_norm_target` writes the sum to its first argument, which is donated.

Loops. Rows outside, as items of work; the lanes of a row inside, as vectors. The order of a sum depends on the row's
length alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray

from pallas_kernels import ffi
from pallas_kernels.cpu_math import FAST, exp, f32
from pallas_kernels.cpu_tiles import FLOAT
from pallas_kernels.ffi import address, argument, data, dimension, result
from pallas_kernels.ffi.loops import njit, with_names
from pallas_kernels.ffi.primitives import pointer

ROWS = 4
"""Rows of an item: fewer are not worth a second thread."""
GRAINS = 4
"""Portions of a thread."""

LOOSE = {"contract", "reassoc", "nsz", "arcp"}
"""Fused multiply-adds and sums in vector order; what is not a number stays none."""

_activation: Any = None
"""Stands for the function that `_gate_loop` puts in its place."""


@ffi.known_again
def norm_target() -> str:
    """Return the name of the custom call (x ``[rows, size]``, scale ``[size]``, eps and offset ``[2]``) -> normed x."""
    return register("jpaged_rms_norm", _norm)


@ffi.known_again
def add_norm_target() -> str:
    """Return the name of the custom call (x, more ``[rows, size]``, scale, eps and offset) -> (x + more, normed)."""
    return register("jpaged_add_rms_norm", _add_norm)


@ffi.known_again
def gate_target(activation: str) -> str:
    """Return the name of the custom call (both ``[rows, 2 * width]``) -> ``act(gate) * up``; `activation` names one of
    `_FUNCTIONS`."""
    return register(f"jpaged_gated_{activation}", _gate_loop(activation))


def register(name: str, loop: Any) -> str:
    """Make a loop over items of `ROWS` of its first argument's rows known as a custom call, and return its name."""
    ffi.register(name, loop, items_of=((0, 0),), portion=ROWS, grains=GRAINS)
    return name


@njit
def row_at(buffer, row, size):
    """Return a row of float32 numbers."""
    return carray(pointer(address(buffer) + row * size * FLOAT), (size,), np.float32)


@njit(fastmath=LOOSE)
def _sum_of_squares(x):
    total = f32(0.0)
    for lane in range(x.size):
        total += x[lane] * x[lane]
    return total


@njit(fastmath=LOOSE)
def _add(x, more, out):
    for lane in range(x.size):
        out[lane] = x[lane] + more[lane]


@njit(fastmath=LOOSE)
def _multiply(x, factor, scale, offset, out):
    for lane in range(x.size):
        out[lane] = x[lane] * factor * (offset + scale[lane])


@njit(error_model="numpy")
def inverse_size(x, eps):
    """Return one over the root of the mean of squares, `eps` added to it."""
    return f32(1.0) / np.sqrt(_sum_of_squares(x) / f32(x.size) + eps)


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _norm(frame, begin, end):
    x, out = argument(frame, 0), result(frame, 0)
    rows, size = dimension(x, 0), dimension(x, 1)
    scale = row_at(argument(frame, 1), 0, size)
    eps, offset = carray(data(argument(frame, 2)), (2,), np.float32)
    for row in range(begin * ROWS, min(end * ROWS, rows)):
        mine = row_at(x, row, size)
        _multiply(mine, inverse_size(mine, eps), scale, offset, row_at(out, row, size))


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _add_norm(frame, begin, end):
    x, more, out = argument(frame, 0), argument(frame, 1), result(frame, 1)
    rows, size = dimension(x, 0), dimension(x, 1)
    scale = row_at(argument(frame, 2), 0, size)
    eps, offset = carray(data(argument(frame, 3)), (2,), np.float32)
    for row in range(begin * ROWS, min(end * ROWS, rows)):
        total = row_at(result(frame, 0), row, size)
        _add(row_at(x, row, size), row_at(more, row, size), total)
        _multiply(total, inverse_size(total, eps), scale, offset, row_at(out, row, size))


@njit(fastmath=LOOSE)
def _sigmoid(x):
    small = exp(-abs(x))
    return (f32(1.0) if x >= 0 else small) / (f32(1.0) + small)


@njit(fastmath=LOOSE)
def _silu(x):
    return x * _sigmoid(x)


@njit(fastmath=LOOSE)
def _gelu_tanh(x):
    """Return GELU by its approximation with tanh (Hendrycks & Gimpel, 2016)."""
    return x * _sigmoid(x * (f32(1.5957691216) + f32(0.0713548162726) * x * x))


_FUNCTIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh}


@cache
def _gate_loop(activation: str) -> Any:
    """Return the compiled loop of one activation."""
    function = _FUNCTIONS[activation]

    def gate(left, right, out):
        for lane in range(out.size):
            out[lane] = function(left[lane]) * right[lane]

    names = {"_activation": njit(fastmath=LOOSE)(gate)}
    return ffi.cfunc(ffi.RUN, error_model="numpy")(with_names(_gate, names))


def _gate(frame, begin, end):
    both, out = argument(frame, 0), result(frame, 0)
    rows, width = dimension(both, 0), dimension(out, 1)
    for row in range(begin * ROWS, min(end * ROWS, rows)):
        left, right = row_at(both, 2 * row, width), row_at(both, 2 * row + 1, width)
        _activation(left, right, row_at(out, row, width))


_PART = 512
"""Numbers whose maximum is found at once: only the part of a row's is searched for its place."""


@ffi.known_again
def totals_target() -> str:
    """Return the name of the custom call (x ``[rows, size]``) -> (places of the largest ``[rows]``, logarithms of the
    exponentials' sums ``[rows]``)."""
    name = "jpaged_largest"
    ffi.register(name, _largest, items_of=((0, 0),))
    return name


@njit(fastmath=FAST)
def _maximum(x):
    most = x[0]
    for lane in range(1, x.size):
        most = max(most, x[lane])
    return most


@njit(fastmath={"contract", "reassoc", "nsz", "arcp"})
def _sum_of_exponentials(x, top):
    total = f32(0.0)
    for lane in range(x.size):
        total += exp(x[lane] - top)
    return total


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _largest(frame, begin, end):
    x = argument(frame, 0)
    rows, size = dimension(x, 0), dimension(x, 1)
    places = carray(data(result(frame, 0)), (rows,), np.int32)
    totals = carray(data(result(frame, 1)), (rows,), np.float32)
    for row in range(begin, end):
        numbers = carray(pointer(address(x) + row * size * FLOAT), (size,), np.float32)
        top, first = numbers[0], 0
        for start in range(0, size, _PART):
            most = _maximum(numbers[start : start + _PART])
            if most > top:
                top, first = most, start
        place = first
        while place < size - 1 and numbers[place] != top:
            place += 1
        places[row] = place
        totals[row] = top + np.log(_sum_of_exponentials(numbers, top))
