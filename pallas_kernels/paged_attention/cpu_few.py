"""Adds up weighted values of bfloat16 for few queries, as decodes have: values are widened in registers.

Where many queries share them, they are widened once, to where all find them (`cpu_rows`). Both give the same bits.
"""

from __future__ import annotations

from numba import njit

from pallas_kernels.cpu_tiles import FLOAT
from pallas_kernels.paged_attention.cpu_block import COLUMNS, ROWS, weighted
from pallas_kernels.paged_attention.cpu_math import HALF
from pallas_kernels.paged_attention.cpu_rows import bfloat16

MOST = ROWS
"""Queries that are few."""
_BYTES = 2

_six, _five, _four, _three, _two, _one = (weighted(rows, bfloat16) for rows in range(ROWS, 0, -1))


@njit
def add_few_values(weights, values, offset, keys, out, width, shrink, number):
    """Do as `cpu_block.add_values` with values of bfloat16, for up to `MOST` queries."""
    stride = width * FLOAT
    for column in range(0, HALF, COLUMNS):
        v, to = offset + column * _BYTES, out + column * FLOAT
        if number == 6:
            _six(weights, values, v, keys, to, stride, shrink)
        elif number == 5:
            _five(weights, values, v, keys, to, stride, shrink)
        elif number == 4:
            _four(weights, values, v, keys, to, stride, shrink)
        elif number == 3:
            _three(weights, values, v, keys, to, stride, shrink)
        elif number == 2:
            _two(weights, values, v, keys, to, stride, shrink)
        else:
            _one(weights, values, v, keys, to, stride, shrink)
