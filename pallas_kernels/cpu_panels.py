"""Holds what a CPU's products with panels of 16 outputs share: the walk over experts, zeros, and copies of numbers.

A table of experts lies as [experts, panels, ...], so its items of work are the panels of all experts, one expert after
another. Rows are sorted by expert: those of an expert follow those of the expert before it. Only panels of experts that
have rows are read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from pallas_kernels.cpu_tiles import FLOAT
from pallas_kernels.ffi.loops import njit
from pallas_kernels.ffi.primitives import pointer
from pallas_kernels.tile_order import OUTPUTS

GRAINS_OF_EXPERTS = 16
"""Portions of a thread in a product of experts, some of which have more rows than others, or none."""


def over_experts(multiply: Any) -> Any:
    """Return ``f(begin, end, counts, panels, rows, to, outputs, operands)``, to be called from compiled loops.

    It multiplies rows of experts with the panels of items `begin` to `end`, `panels` of them an expert's, and zeroes
    these columns of rows of no expert. `counts` are the experts' rows, and `to` is the address of the result, float32
    [rows, outputs].

    Args:
        multiply: ``f(operands, expert, row, number, panel, stop, to, outputs)``, compiled, which multiplies `number`
            rows, of which `row` is the first, with an expert's panels from `panel` to `stop`. Here `to` is the address
            of that first row's results.
    """

    @njit
    def walk(begin, end, counts, panels, rows, to, outputs, operands):
        row, seen, place = 0, 0, begin
        while place < end:
            expert, panel = place // panels, place % panels
            stop = min(panels, panel + end - place)
            place += stop - panel
            row, number = rows_of_expert(counts, expert, rows, seen, row)
            seen = expert
            if expert + 1 == len(counts):
                clear_columns(to, row + number, rows, panel * OUTPUTS, min(stop * OUTPUTS, outputs), outputs)
            if number > 0:
                multiply(operands, expert, row, number, panel, stop, to + row * outputs * FLOAT, outputs)

    return walk


@njit
def rows_of_expert(counts, expert, rows, seen, row):
    """Return the first row of an expert, and how many it has; `row` is that of expert `seen`, which is not after it."""
    for before in range(seen, expert):
        row += counts[before]
    return row, max(0, min(counts[expert], rows - row))


@njit
def clear_columns(out, begin, end, first, last, outputs):
    """Zero some columns of the rows from `begin` to `end`."""
    numbers = carray(pointer(out), (end, outputs), np.float32)
    for row in range(begin, end):
        for column in range(first, last):
            numbers[row, column] = np.float32(0.0)


@njit
def copy_numbers(source, to, number):
    """Copy some float32 numbers."""
    read, write = carray(pointer(source), (number,), np.float32), carray(pointer(to), (number,), np.float32)
    for place in range(number):
        write[place] = read[place]
