"""Holds the loops of `pallas_kernels.matmul.grouped`, compiled by Numba: a panel of one expert's columns is an item of
work, and takes no time where the expert has no rows."""

from __future__ import annotations

import numpy as np
from numba import carray

from pallas_kernels import ffi
from pallas_kernels.cpu_tiles import FLOAT, LANES, stack_memory
from pallas_kernels.ffi import address, argument, data, dimension, result
from pallas_kernels.matmul.cpu_kernel import DEPTH, PACKED, PANEL_VECTORS, _clear, multiply_columns
from pallas_kernels.panelled_floats import PANEL

_GRAINS = 16


@ffi.known_again
def grouped_target() -> str:
    """Return the name of the custom call ``(x [rows, inputs], counts [experts], table [experts, inputs, outputs]) ->
    each row times its expert's matrix``, rows of no expert 0."""
    name = "jpaged_matmul_grouped"
    ffi.register(name, _multiply_grouped, items_of=((2, 0), (2, 2)), portion=LANES, grains=_GRAINS)
    return name


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _multiply_grouped(frame, begin, end):
    first, table = argument(frame, 0), argument(frame, 2)
    rows, experts, inputs, outputs = dimension(first, 0), dimension(table, 0), dimension(table, 1), dimension(table, 2)
    counts = carray(data(argument(frame, 1)), (experts,), np.int32)
    x_stride, stride = inputs * FLOAT, outputs * FLOAT
    packed = stack_memory(PACKED)
    row, seen = 0, 0
    for item in range(begin, end):
        expert, column = item * LANES // outputs, item * LANES % outputs
        if column % PANEL:
            continue
        while seen < expert:
            row += counts[seen]
            seen += 1
        out = address(result(frame, 0)) + column * FLOAT
        vectors = min(PANEL_VECTORS, (outputs - column) // LANES)
        if expert + 1 == experts:
            after = row + counts[expert]
            _clear(out + after * stride, rows - after, vectors * LANES, stride)
        number = min(counts[expert], rows - row)
        if number <= 0:
            continue
        x, panel, to = address(first) + row * x_stride, address(table) + expert * inputs * stride, out + row * stride
        panel += column * FLOAT
        for at in range(0, inputs, DEPTH):
            depth = min(DEPTH, inputs - at)
            mine, theirs = x + at * FLOAT, panel + at * stride
            coming = theirs + (depth * stride if at + depth < inputs else PANEL * FLOAT)
            multiply_columns(mine, x_stride, number, theirs, stride, depth, to, stride, at, packed, coming, vectors)
