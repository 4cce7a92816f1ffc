"""Lays out the scratch memory of the loops in `cpu_kernel`, which compute a few queries span by span."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from pallas_kernels.cpu_math import f32, fill
from pallas_kernels.cpu_tiles import FLOAT
from pallas_kernels.ffi.loops import njit
from pallas_kernels.ffi.primitives import pointer

HIDDEN = f32(-1e30)
"""Score of a key that is not seen."""
SPAN = 64
"""Keys whose softmax is taken at once; spans begin at multiples of it, whatever the size of a block."""
HALF = 64
"""Lanes that share a scale; the widths of keys and values are multiples of it."""
WORD = 8
"""Bytes of an address."""
TOGETHER = 24
"""Queries whose scores of a span are kept at once: their scores, 6 KiB, stay in the first-level cache."""


class Scratch(NamedTuple):
    """Holds the addresses of the state of queries that are computed together, and of a span of keys and values.

    They are addresses, not arrays, because Numba counts references of arrays at every call.

    Attributes:
        queries, values: float32, a row a query; values are weighted sums.
        first, stop: int64, the range of keys that each query sees.
        weights: float32 ``[TOGETHER, SPAN]``.
        top, total, shrink, all_tops, all_totals: float32, one a query.
        keys, wide: float32 ``[key_width, SPAN]`` and ``[value_halves, SPAN, HALF]``; `wide_rows`: addresses of its
            first rows.
        rows, coming: addresses of this span's rows and of the next one's, then those of their blocks.
        moved: addresses of one lane of the span's rows, for each half of a value.
        scales: float32, one a key.
        nothing: a row of zeros, which is read in place of a row that is not seen.
    """

    queries: int
    values: int
    first: int
    stop: int
    weights: int
    top: int
    total: int
    shrink: int
    all_tops: int
    all_totals: int
    keys: int
    wide: int
    wide_rows: int
    rows: int
    coming: int
    moved: int
    scales: int
    nothing: int


@njit
def floats(address, number):
    """Return the `number` float32 at an address as an array."""
    return carray(pointer(address), (number,), np.float32)


@njit
def words(address, number):
    """Return the `number` int64 at an address as an array."""
    return carray(pointer(address), (number,), np.int64)


@njit
def scratch_bytes(number, key_width, value_width):
    """Return the bytes that `scratch_at` needs."""
    in_floats = number * (key_width + value_width + 5) + SPAN * (TOGETHER + key_width + value_width + 1) + HALF
    return in_floats * FLOAT + (2 * number + (5 + value_width // HALF) * SPAN) * WORD


@njit
def scratch_at(address, number, key_width, value_width):
    """Lay out the scratch of `number` queries in memory that begins at an address."""
    first = address
    stop = first + number * WORD
    rows = stop + number * WORD
    coming = rows + 2 * SPAN * WORD
    wide_rows = coming + 2 * SPAN * WORD
    moved = wide_rows + SPAN * WORD
    weights = moved + value_width // HALF * SPAN * WORD
    keys = weights + TOGETHER * SPAN * FLOAT
    wide = keys + key_width * SPAN * FLOAT
    scales = wide + value_width * SPAN * FLOAT
    nothing = scales + SPAN * FLOAT
    queries = nothing + HALF * FLOAT
    values = queries + number * key_width * FLOAT
    top = values + number * value_width * FLOAT
    one = number * FLOAT
    fill(floats(nothing, HALF), f32(0.0))
    addresses = words(wide_rows, SPAN)
    for n in range(SPAN):
        addresses[n] = wide + n * HALF * FLOAT
    sums = (top, top + one, top + 2 * one, top + 3 * one, top + 4 * one)
    return Scratch(
        queries, values, first, stop, weights, *sums, keys, wide, wide_rows, rows, coming, moved, scales, nothing
    )
