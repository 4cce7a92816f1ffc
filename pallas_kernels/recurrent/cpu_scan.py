"""Holds the loops of the selective scan on CPUs, see `pallas_kernels.recurrent.cpu_walk`.

A channel has its own decay for each of its states, so a unit is no product of matrices: its tokens pass over a tile
that stays in the first cache, and the exponentials, which are most of the work, fill vectors.
"""

from __future__ import annotations

from functools import cache

from numba import njit

from pallas_kernels import ffi
from pallas_kernels.cpu_tiles import LANES
from pallas_kernels.paged_attention.cpu_math import exp, f32
from pallas_kernels.recurrent.cpu_products import row_at, stride_of
from pallas_kernels.recurrent.cpu_scan_channels import scan_channels
from pallas_kernels.recurrent.cpu_walk import register, six_operands, walks

_LN2 = f32(0.6931471805599453)


@njit
def _token(state, at, token, operands, out, scratch):
    """operands: x, dt [tokens, ch], b, c [tokens, n], a [n, ch] to the base 2, d [1, ch]."""
    _channels(state, at, token, token + 1, operands, out, scratch.shape[1])


@njit
def _piece(state, at, start, length, operands, out, rooms):
    """Take a vector's channels through all tokens, then the next one's."""
    _channels(state, at, start, start + length, operands, out, state.shape[1])


@njit
def _channels(state, at, start, stop, operands, out, width):
    x, dt, b, c, a, d = operands
    size, stride, vectors = len(state), stride_of(a), width // LANES
    for token in range(start, stop):
        its_b, its_c = row_at(b, token, 0), row_at(c, token, 0)
        for vector in range(vectors):
            lane = vector * LANES
            place, rates, skip = row_at(state, 0, lane), row_at(a, 0, at + lane), row_at(d, 0, at + lane)
            given, steps, to = row_at(x, token, at + lane), row_at(dt, token, at + lane), row_at(out, token, at + lane)
            scan_channels(place, stride_of(state), rates, stride, size, given, steps, skip, its_b, its_c, to)
    for i in range(vectors * LANES, width):
        for token in range(start, stop):
            step, given = dt[token, at + i], x[token, at + i]
            y = d[0, at + i] * given
            for n in range(size):
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


@cache
def targets() -> tuple[str, str]:
    """Return the names of the custom calls, see `pallas_kernels.recurrent.cpu_walk.register`."""
    return register("scan", _decodes, _units)
