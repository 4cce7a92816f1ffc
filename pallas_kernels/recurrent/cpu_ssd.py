"""Holds the loops of SSD on CPUs, see `pallas_kernels.recurrent.cpu_walk`.

A tile is [n, columns]: the columns are whole heads of one group, `of_head` columns each. A token makes one pass over
the tile, row by row. A piece of up to `UNIT` tokens is a few matrix products per head, as in attention, whose operands
lie in `Scratch`, small enough to stay in the cache.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels import ffi
from pallas_kernels.cpu_math import FAST, copy, exp, f32
from pallas_kernels.cpu_tiles import FLOAT
from pallas_kernels.ffi.loops import njit
from pallas_kernels.recurrent.cpu_products import (
    fade,
    multiply,
    multiply_earlier,
    multiply_lower,
    row_at,
    scale,
    stride_of,
)
from pallas_kernels.recurrent.cpu_walk import register, six_operands
from pallas_kernels.recurrent.layout import UNIT


@njit(fastmath=FAST)
def _token(state, at, token, operands, out, rows):
    """operands: x [tokens, h * p], dt [tokens, h], b, c [tokens, g * n], a, d [1, h]; a tile is heads of one group."""
    x, dt, b, c, a, d = operands
    width, decays, inputs, y = rows.shape[1], rows[0], rows[1], rows[2]
    of_head = x.shape[1] // dt.shape[1]
    for begin in range(0, width, of_head):
        head = (at + begin) // of_head
        step = dt[token, head]
        decay, skip = exp(step * a[0, head]), d[0, head]
        for i in range(begin, begin + of_head):
            decays[i] = decay
            inputs[i] = step * x[token, at + i]
            y[i] = skip * x[token, at + i]
    size = len(state)
    first = at // (x.shape[1] // (b.shape[1] // size)) * size
    # One pass updates a row and adds it to the output: vectors run along columns, so no sum crosses lanes.
    for n in range(size):
        row, b_n, c_n = state[n], b[token, first + n], c[token, first + n]
        for i in range(width):
            value = decays[i] * row[i] + b_n * inputs[i]
            row[i] = value
            y[i] += c_n * value
    copy(y, out[token, at : at + width])


@njit(fastmath=FAST)
def _piece(state, at, start, length, operands, out, scratch):
    """Attend over the piece and the state before it (arXiv 2405.21060, section 6), a head of the tile at a time."""
    x, dt, b, c, a, d = operands
    logs, turned, inputs = scratch.logs, scratch.turned, scratch.values
    size, width, of_head = len(state), state.shape[1], x.shape[1] // dt.shape[1]
    first = at // (x.shape[1] // (b.shape[1] // size)) * size
    c_at, b_at = row_at(c, start, first), row_at(b, start, first)
    # All heads of the group share these: overlaps[t, s] = c_t . b_s for s <= t, and b transposed, [n, tokens].
    multiply_earlier(c_at, stride_of(c), b_at, stride_of(b), length, size, scratch.overlaps.ctypes.data, UNIT * FLOAT)
    for token in range(length):
        for n in range(size):
            turned[n, token] = b[start + token, first + n]
    for begin in range(0, width, of_head):
        lane, head, total = at + begin, (at + begin) // of_head, 0.0
        # Sums of logarithms in float64, whose differences keep enough digits.
        for token in range(length):
            total += np.float64(dt[start + token, head]) * np.float64(a[0, head])
            logs[token] = total
        fade(scratch.weights, scratch.overlaps, logs, length)
        to, of_state = row_at(out, start, lane), row_at(state, 0, begin)
        # out = decay since the start * (c @ state) + d * x + weights @ (dt * x), in the output's own memory.
        multiply(c_at, stride_of(c), length, of_state, stride_of(state), size, to, stride_of(out), of_head, 0)
        for token in range(length):
            since, step, mine = exp(f32(logs[token])), dt[start + token, head], inputs[token]
            given, y = x[start + token, lane : lane + of_head], out[start + token, lane : lane + of_head]
            for i in range(of_head):
                mine[i] = step * given[i]
                y[i] = since * y[i] + d[0, head] * given[i]
        multiply_lower(scratch.weights, length, inputs.ctypes.data, stride_of(inputs), to, stride_of(out), of_head)
        # state = decay over the piece * state + b^T @ (dt * x * decay until the end).
        for token in range(length):
            until, mine = exp(f32(total - logs[token])), inputs[token]
            for i in range(of_head):
                mine[i] *= until
        scale(state[:, begin : begin + of_head], size, of_head, exp(f32(total)))
        turned_at = turned.ctypes.data
        multiply(
            turned_at,
            UNIT * FLOAT,
            size,
            inputs.ctypes.data,
            stride_of(inputs),
            length,
            of_state,
            stride_of(state),
            of_head,
            1,
        )


@ffi.known_again
def targets() -> tuple[str, str]:
    """Return the names of the custom calls, see `pallas_kernels.recurrent.cpu_walk.register`."""
    return register("ssd", six_operands, _token, _piece)
