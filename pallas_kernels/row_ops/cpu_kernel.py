"""Holds the loops of `pallas_kernels.row_ops.cpu`, compiled by Numba: a few rows are an item of work.

Sums over a row are vectors', in an order that its length alone decides.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
from numba import carray, njit

from pallas_kernels import ffi
from pallas_kernels.cpu_tiles import FLOAT
from pallas_kernels.ffi import address, argument, data, dimension, result
from pallas_kernels.ffi.primitives import pointer
from pallas_kernels.paged_attention.cpu_math import exp, f32

ROWS = 4
"""Rows of an item: fewer are not worth a second thread."""
GRAINS = 4
"""Portions of a thread."""

_LOOSE = {"contract", "reassoc", "nsz", "arcp"}
"""Fused multiply-adds and sums in vector order; what is not a number stays none."""

_activation: Any = None
"""Stands for the function that `_gate_loop` puts in its place."""


@ffi.known_again
def norm_target() -> str:
    """Return the name of the custom call (x ``[rows, size]``, scale ``[size]``, eps and offset ``[2]``) -> normed x."""
    return _register("jpaged_rms_norm", _norm)


@ffi.known_again
def add_norm_target() -> str:
    """Return the name of the custom call (x, more ``[rows, size]``, scale, eps and offset) -> (x + more, normed)."""
    return _register("jpaged_add_rms_norm", _add_norm)


@ffi.known_again
def gate_target(activation: str) -> str:
    """Return the name of the custom call (both ``[rows, 2 * width]``) -> ``act(gate) * up``; `activation` names one of
    `_FUNCTIONS`."""
    return _register(f"jpaged_gated_{activation}", _gate_loop(activation))


@ffi.known_again
def rotation_target() -> str:
    """Return the name of the custom call (fused ``[tokens, heads, rows, width]``, cos, sin ``[tokens, half]``) ->
    (turned queries ``[tokens, heads, rows - 2, width]``, turned keys and values ``[tokens, heads, width]``)."""
    return _register("jpaged_rotated_apart", _rotate)


def _register(name: str, loop: Any) -> str:
    ffi.register(name, loop, items_of=((0, 0),), portion=ROWS, grains=GRAINS)
    return name


@njit
def _row(buffer, row, size):
    """Return a row of float32 numbers."""
    return carray(pointer(address(buffer) + row * size * FLOAT), (size,), np.float32)


@njit(fastmath=_LOOSE)
def _sum_of_squares(x):
    total = f32(0.0)
    for lane in range(x.size):
        total += x[lane] * x[lane]
    return total


@njit(fastmath=_LOOSE)
def _add(x, more, out):
    for lane in range(x.size):
        out[lane] = x[lane] + more[lane]


@njit(fastmath=_LOOSE)
def _multiply(x, factor, scale, offset, out):
    for lane in range(x.size):
        out[lane] = x[lane] * factor * (offset + scale[lane])


@njit(error_model="numpy")
def _inverse_size(x, eps):
    return f32(1.0) / np.sqrt(_sum_of_squares(x) / f32(x.size) + eps)


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _norm(frame, begin, end):
    x, out = argument(frame, 0), result(frame, 0)
    rows, size = dimension(x, 0), dimension(x, 1)
    scale = _row(argument(frame, 1), 0, size)
    eps, offset = carray(data(argument(frame, 2)), (2,), np.float32)
    for row in range(begin * ROWS, min(end * ROWS, rows)):
        mine = _row(x, row, size)
        _multiply(mine, _inverse_size(mine, eps), scale, offset, _row(out, row, size))


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _add_norm(frame, begin, end):
    x, more, out = argument(frame, 0), argument(frame, 1), result(frame, 1)
    rows, size = dimension(x, 0), dimension(x, 1)
    scale = _row(argument(frame, 2), 0, size)
    eps, offset = carray(data(argument(frame, 3)), (2,), np.float32)
    for row in range(begin * ROWS, min(end * ROWS, rows)):
        total = _row(result(frame, 0), row, size)
        _add(_row(x, row, size), _row(more, row, size), total)
        _multiply(total, _inverse_size(total, eps), scale, offset, _row(out, row, size))


@njit(fastmath=_LOOSE)
def _sigmoid(x):
    small = exp(-abs(x))
    return (f32(1.0) if x >= 0 else small) / (f32(1.0) + small)


@njit(fastmath=_LOOSE)
def _silu(x):
    return x * _sigmoid(x)


@njit(fastmath=_LOOSE)
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

    names = _gate.__globals__ | {"_activation": njit(fastmath=_LOOSE)(ffi.named(gate, activation))}
    loop = FunctionType(_gate.__code__, names, "gate")
    return ffi.cfunc(ffi.RUN, error_model="numpy")(ffi.named(loop, activation))


def _gate(frame, begin, end):
    both, out = argument(frame, 0), result(frame, 0)
    rows, width = dimension(both, 0), dimension(out, 1)
    for row in range(begin * ROWS, min(end * ROWS, rows)):
        left, right = _row(both, 2 * row, width), _row(both, 2 * row + 1, width)
        _activation(left, right, _row(out, row, width))


@njit(fastmath=_LOOSE)
def _turn(x, cos, sin, out):
    half = cos.size
    for pair in range(half):
        left, right = x[pair], x[half + pair]
        out[pair] = left * cos[pair] - right * sin[pair]
        out[half + pair] = right * cos[pair] + left * sin[pair]
    out[2 * half :] = x[2 * half :]


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _rotate(frame, begin, end):
    fused, angles = argument(frame, 0), argument(frame, 1)
    tokens, heads, rows, width = dimension(fused, 0), dimension(fused, 1), dimension(fused, 2), dimension(fused, 3)
    half = dimension(angles, 1)
    for token in range(begin * ROWS, min(end * ROWS, tokens)):
        cos, sin = _row(angles, token, half), _row(argument(frame, 2), token, half)
        for head in range(token * heads, (token + 1) * heads):
            for row in range(rows - 2):
                _turn(
                    _row(fused, head * rows + row, width),
                    cos,
                    sin,
                    _row(result(frame, 0), head * (rows - 2) + row, width),
                )
            _turn(_row(fused, (head + 1) * rows - 2, width), cos, sin, _row(result(frame, 1), head, width))
            _row(result(frame, 2), head, width)[:] = _row(fused, (head + 1) * rows - 1, width)
