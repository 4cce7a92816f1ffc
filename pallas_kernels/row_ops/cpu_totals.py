"""Holds the loop that finds the largest number of a row and the logarithm of its exponentials' sum: a row is an item.

A row of a vocabulary is read from memory once; for its second pass it lies in the second cache.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from pallas_kernels import ffi
from pallas_kernels.cpu_tiles import FLOAT
from pallas_kernels.ffi import address, argument, data, dimension, result
from pallas_kernels.ffi.primitives import pointer
from pallas_kernels.paged_attention.cpu_math import FAST, exp, f32

_PART = 512
"""Numbers whose maximum is found at once: only the part of a row's is searched for its place."""


@ffi.known_again
def target() -> str:
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
