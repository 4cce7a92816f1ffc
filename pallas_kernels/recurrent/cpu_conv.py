"""Holds the loops of the causal convolution on CPUs, see `pallas_kernels.recurrent.cpu_walk`.

A tile is [width - 1, columns], the last inputs of some channels, the oldest first. Vectors run along channels.
"""

from __future__ import annotations

from pallas_kernels import ffi
from pallas_kernels.cpu_math import FAST, exp, f32
from pallas_kernels.ffi.loops import njit
from pallas_kernels.recurrent.cpu_walk import four_operands, register


@njit
def _token(state, at, token, operands, out, rows):
    """operands: x [tokens, ch], weight [width, ch], bias [1, ch], whether there is an activation [1, 1]."""
    _convolve(state, at, token, token + 1, operands, out, rows.shape[1])


@njit
def _piece(state, at, start, length, operands, out, scratch):
    """See `_token`."""
    _convolve(state, at, start, start + length, operands, out, state.shape[1])


@njit
def _convolve(state, at, start, stop, operands, out, width):
    x, weight, bias, silu = operands
    kept = len(state)
    for token in range(start, stop):
        y = out[token, at : at + width]
        _first_tap(y, bias[0, at : at + width], weight[kept, at : at + width], x[token, at : at + width])
        # An earlier input comes from this unit's tokens or, before its start, from the state.
        for tap in range(kept):
            source = token - kept + tap
            if source >= start:
                _add_tap(y, weight[tap, at : at + width], x[source, at : at + width])
            else:
                _add_tap(y, weight[tap, at : at + width], state[kept + source - start, :width])
        if silu[0, 0] != f32(0.0):
            _activate(y)
    # Ascending order: a row moved within the state is read before it is overwritten.
    for tap in range(kept):
        source = stop - kept + tap
        row, last = state[tap], source - start + kept
        for i in range(width):
            row[i] = x[source, at + i] if source >= start else state[last, i]


@njit(fastmath=FAST)
def _first_tap(y, bias, weight, x):
    for i in range(y.size):
        y[i] = bias[i] + weight[i] * x[i]


@njit(fastmath=FAST)
def _add_tap(y, weight, x):
    for i in range(y.size):
        y[i] += weight[i] * x[i]


@njit(fastmath=FAST, error_model="numpy")
def _activate(y):
    """Multiply with the sigmoid."""
    for i in range(y.size):
        e = exp(-abs(y[i]))
        y[i] *= (f32(1.0) if y[i] >= f32(0.0) else e) / (f32(1.0) + e)


@ffi.known_again
def targets() -> tuple[str, str]:
    """Return the names of the custom calls, see `pallas_kernels.recurrent.cpu_walk.register`."""
    return register("conv", four_operands, _token, _piece)
