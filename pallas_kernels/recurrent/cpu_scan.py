"""Holds the loops of the selective scan on CPUs, see `pallas_kernels.recurrent.cpu_walk`.

A channel has a separate decay for each of its states, so a unit is no product of matrices. Instead, the loops take one
vector of channels at a time through all tokens of the unit, and its states stay in registers from token to token.
"""

from __future__ import annotations

from numba import njit

from pallas_kernels import ffi
from pallas_kernels.cpu_tiles import LANES
from pallas_kernels.paged_attention.cpu_math import exp, f32
from pallas_kernels.recurrent.cpu_products import row_at, stride_of
from pallas_kernels.recurrent.cpu_scan_channels import STATES, scan_tokens
from pallas_kernels.recurrent.cpu_walk import register, six_operands, walks

_LN2 = f32(0.6931471805599453)


_many, _one = scan_tokens(STATES), scan_tokens(1)


@njit
def _token(state, at, token, operands, out, scratch):
    """operands: x, dt [tokens, ch], b, c [tokens, n], a [n, ch] to the base 2, d [1, ch]."""
    a, width = operands[4], scratch.shape[1]
    vectors = width // LANES
    for lane in range(0, vectors * LANES, LANES):
        _vector(state, lane, at, token, token + 1, operands, row_at(a, 0, at + lane), stride_of(a), out)
    _others(state, vectors * LANES, at, token, token + 1, operands, out, width)


@njit
def _piece(state, at, start, length, operands, out, rooms):
    """Take one vector of channels through all tokens, then the next vector.

    The vector's rates are copied together first: rows of a wide layer lie a power of two apart, and the first-level
    cache can hold only a few such lines.
    """
    a, rates, stop, width = operands[4], rooms.turned, start + length, state.shape[1]
    vectors = width // LANES
    for lane in range(0, vectors * LANES, LANES):
        for n in range(len(state)):
            rates[n, :LANES] = a[n, at + lane : at + lane + LANES]
        _vector(state, lane, at, start, stop, operands, row_at(rates, 0, 0), stride_of(rates), out)
    _others(state, vectors * LANES, at, start, stop, operands, out, width)


@njit
def _vector(state, lane, at, start, stop, operands, rates, rates_stride, out):
    """Take `LANES` channels through the tokens from `start` to `stop`, as many states at a time as registers hold."""
    x, dt, b, c, _, d = operands
    given, steps, to = row_at(x, start, at + lane), row_at(dt, start, at + lane), row_at(out, start, at + lane)
    skip, stride, its_stride, below = row_at(d, 0, at + lane), stride_of(x), stride_of(b), stride_of(state)
    n, size = 0, len(state)
    while n < size:
        place, rate = row_at(state, n, lane), rates + n * rates_stride
        its_b, its_c, tokens = row_at(b, start, n), row_at(c, start, n), stop - start
        if size - n >= STATES:
            _many(place, below, rate, rates_stride, given, steps, skip, its_b, its_c, its_stride, to, stride, tokens, n)
            n += STATES
        else:
            _one(place, below, rate, rates_stride, given, steps, skip, its_b, its_c, its_stride, to, stride, tokens, n)
            n += 1


@njit
def _others(state, first, at, start, stop, operands, out, width):
    """Take the channels after the last whole vector through the tokens."""
    x, dt, b, c, a, d = operands
    for i in range(first, width):
        for token in range(start, stop):
            step, given = dt[token, at + i], x[token, at + i]
            y = d[0, at + i] * given
            for n in range(len(state)):
                state[n, i] = exp(step * a[n, at + i] * _LN2) * state[n, i] + b[token, n] * (step * given)
                y += c[token, n] * state[n, i]
            out[token, at + i] = y


_walk_decodes, _walk_units = walks(_token, _piece)


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _decodes(frame, begin, end):
    _walk_decodes(frame, begin, end, six_operands(frame))


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _units(frame, begin, end):
    _walk_units(frame, begin, end, six_operands(frame))


@ffi.known_again
def targets() -> tuple[str, str]:
    """Return the names of the custom calls, see `pallas_kernels.recurrent.cpu_walk.register`."""
    return register("scan", _decodes, _units)
