"""Holds the loops of the gated delta rule on CPUs, see `pallas_kernels.recurrent.cpu_walk`.

A tile is one head's state, [keys, values]. A token makes two passes over it; a piece of up to `UNIT` tokens is a few
matrix products, whose operands lie in `Scratch`, around one triangular solve.
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
from pallas_kernels.recurrent.cpu_walk import five_operands, register
from pallas_kernels.recurrent.layout import UNIT


@njit(fastmath=FAST)
def _token(state, at, token, operands, out, rows):
    """operands: q, k [tokens, h * k], v [tokens, h * v], log_decay, beta [tokens, h]; a tile is a head."""
    q, k, v, log_decay, beta = operands
    size, width = len(state), rows.shape[1]
    head = at // (size * width)
    says, y = rows[0], rows[1]
    keys, queries = k[token, head * size : (head + 1) * size], q[token, head * size : (head + 1) * size]
    values, decay = v[token, head * width : (head + 1) * width], exp(log_decay[token, head])
    for i in range(width):
        says[i] = y[i] = f32(0.0)
    # First pass: the decayed state's values for the key and for the query. Second pass: the update. The query's reading
    # after the update is its reading before it plus (k . q) * correction, so no third pass is needed.
    both = f32(0.0)
    for n in range(size):
        row, k_n, q_n = state[n], keys[n] * decay, queries[n] * decay
        both += keys[n] * queries[n]
        for i in range(width):
            says[i] += k_n * row[i]
            y[i] += q_n * row[i]
    rate = beta[token, head]
    for i in range(width):
        says[i] = rate * (values[i] - says[i])
        y[i] += both * says[i]
    for n in range(size):
        row, k_n = state[n], keys[n]
        for i in range(width):
            row[i] = decay * row[i] + k_n * says[i]
    copy(y, out[token, head * width : (head + 1) * width])


@njit(fastmath=FAST)
def _piece(state, at, start, length, operands, out, scratch):
    """Compute each token's correction of the state, then attend over the corrections (arXiv 2412.06464, section
    3.3)."""
    q, k, v, log_decay, beta = operands
    logs, overlaps, weights = scratch.logs, scratch.overlaps, scratch.weights
    turned, corrections = scratch.turned, scratch.values
    size, width = len(state), state.shape[1]
    head, total = at // (size * width), 0.0
    for token in range(length):
        total += np.float64(log_decay[start + token, head])
        logs[token] = total
    k_at, q_at, stride = row_at(k, start, head * size), row_at(q, start, head * size), stride_of(k)
    of_state, to = state.ctypes.data, row_at(out, start, head * width)
    multiply(k_at, stride, length, of_state, width * FLOAT, size, corrections.ctypes.data, width * FLOAT, width, 0)
    multiply_earlier(k_at, stride, k_at, stride, length, size, overlaps.ctypes.data, UNIT * FLOAT)
    fade(weights, overlaps, logs, length)
    # Forward substitution: a token's correction subtracts the part that earlier tokens' corrections cover.
    for token in range(length):
        rate, since, mine = beta[start + token, head], exp(f32(logs[token])), corrections[token]
        given, row = v[start + token, head * width : (head + 1) * width], weights[token]
        for i in range(width):
            mine[i] = rate * (given[i] - since * mine[i])
        if token > 0:
            for other in range(token):
                row[other] *= -rate
            from_row, earlier = row.ctypes.data, corrections.ctypes.data
            multiply(from_row, 0, 1, earlier, width * FLOAT, token, mine.ctypes.data, 0, width, 1)
    # out = decay since the start * (q @ state) + (q k^T, weighed by decays, up to the diagonal) @ corrections.
    multiply(q_at, stride, length, of_state, width * FLOAT, size, to, stride_of(out), width, 0)
    for token in range(length):
        since, y = exp(f32(logs[token])), out[start + token, head * width : (head + 1) * width]
        for i in range(width):
            y[i] *= since
    multiply_earlier(q_at, stride, k_at, stride, length, size, overlaps.ctypes.data, UNIT * FLOAT)
    fade(weights, overlaps, logs, length)
    multiply_lower(weights, length, corrections.ctypes.data, width * FLOAT, to, stride_of(out), width)
    # state = decay over the piece * state + (k * decay until the end)^T @ corrections.
    for token in range(length):
        until = exp(f32(total - logs[token]))
        for n in range(size):
            turned[n, token] = until * k[start + token, head * size + n]
    scale(state, size, width, exp(f32(total)))
    from_k = turned.ctypes.data
    multiply(
        from_k, UNIT * FLOAT, size, corrections.ctypes.data, width * FLOAT, length, of_state, width * FLOAT, width, 1
    )


@ffi.known_again
def targets() -> tuple[str, str]:
    """Return the names of the custom calls, see `pallas_kernels.recurrent.cpu_walk.register`."""
    return register("delta", five_operands, _token, _piece)
