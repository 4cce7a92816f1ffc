"""Multiplies rows that are rounded to bfloat16 with bfloat16 matrices in tiles, in loops that Numba compiles.

Memory. A matrix is [panels, pairs, 16 outputs, 2 inputs]: a tile is a cache line of 64 bytes, a panel one run of
memory. A call first rounds all rows, each once, into a buffer that XLA gives it, [rows, `rounded_numbers`]; all threads
wait for the last row. Sums are float32 in registers, `rows` x `panels` tiles of them (`Pairs`); `cpu_amx` keeps them in
AMX's tiles instead.

Loops, from outside: some panels, an item of work; `DEPTH` pairs of inputs, which stay in the second cache for all rows;
rows; pairs. Each of the first tiles of rows prefetches one of the panels that follow. Rows do not meet, so a row's
bits do not depend on the others.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray

from pallas_kernels import ffi
from pallas_kernels.bfloat16_matmul.cpu_pairs import KINDS, Kind, panels_at_once
from pallas_kernels.bfloat16_matmul.cpu_tiles import LANES, PAIR, product, rounded_row
from pallas_kernels.cpu_panels import GRAINS_OF_EXPERTS, clear_columns, copy_numbers, over_experts
from pallas_kernels.cpu_tiles import stack_memory
from pallas_kernels.ffi import address, argument, data, dimension, result
from pallas_kernels.ffi.loops import njit, with_names
from pallas_kernels.tiled_matmul.cpu_tiles import FLOAT, TILE_BYTES

GRAINS = 4
"""Portions of a thread."""
DEPTH = 1024
"""Pairs of inputs that are multiplied with all rows before the next ones: of three panels 192 KiB."""

_some_panels: Any = None
_over_experts: Any = None
_panels_of_an_item: Any = None
"""Stand for what `_bound` puts in their places: how rows are multiplied with some panels, for each kind."""


@ffi.known_again
def target(kind: Kind) -> str:
    """Return the name of the custom call ``(x, [index, wanted], matrices...) -> (x @ matrices[index], rounded x)``.

    x: float32 [rows, inputs]; a matrix: uint16 [panels, pairs, 16, 2]. Results: float32 [rows, outputs], uint16 [rows,
    `rounded_numbers`]. Only the first `wanted` rows are multiplied; the others give 0.
    """
    name = f"jpaged_bfloat16_{kind}"
    run = ffi.cfunc(ffi.RUN, error_model="numpy")(_bound(_multiply, kind))
    before = _round_rows_to_bfloat16, 0, 0
    ffi.register(name, run, items_of=((2, 0),), portion=panels_at_once(kind), grains=GRAINS, before=before)
    return name


@ffi.known_again
def grouped_target(kind: Kind) -> str:
    """Return the name of the custom call ``(x, [0, rows], table, counts) -> (each row times its expert's matrix,
    rounded x)``, rows of no expert 0.

    table: uint16 [experts, panels, pairs, 16, 2]; counts: int32 [experts]. The rest is as for `target`.
    """
    name = f"jpaged_bfloat16_grouped_{kind}"
    run = ffi.cfunc(ffi.RUN, error_model="numpy")(_bound(_multiply_grouped, kind))
    before = _round_rows_to_bfloat16, 0, 0
    ffi.register(name, run, items_of=((2, 0), (2, 1)), grains=GRAINS_OF_EXPERTS, before=before)
    return name


def _bound(function: Any, kind: Kind) -> Any:
    """Return a function that multiplies by one kind of instructions."""
    names = {
        "_some_panels": _rows_by_some_panels(kind),
        "_over_experts": _rows_by_experts(kind),
        "_panels_of_an_item": panels_at_once(kind),
    }
    return with_names(function, names)


def _rows_by_panels(kind: Kind, panels: int) -> Any:
    """Return the product of any number of rows and so many panels, as a compiled function."""
    most = KINDS[kind].rows
    full, four, two, one = (product(kind, min(rows, most), panels) for rows in (most, 4, 2, 1))

    def multiply(x, x_stride, rows, w, w_panel, pairs, out, stride):
        for at in range(0, pairs, DEPTH):
            depth, row, mine, theirs = min(DEPTH, pairs - at), 0, x + at * PAIR, w + at * TILE_BYTES
            # Prefetch the next panels, one with each of the first tiles of rows.
            coming = theirs + depth * TILE_BYTES if at + depth < pairs else w + panels * w_panel
            end = coming + panels * w_panel
            while rows - row >= most:
                line, step = mine + row * x_stride, TILE_BYTES if coming < end else 0
                fetched = coming if step else line
                full(line, x_stride, theirs, w_panel, depth, out + row * stride, stride, at, fetched, step)
                row, coming = row + most, coming + w_panel
            while rows - row >= 4:
                line = mine + row * x_stride
                four(line, x_stride, theirs, w_panel, depth, out + row * stride, stride, at, line, 0)
                row += 4
            while rows - row >= 2:
                line = mine + row * x_stride
                two(line, x_stride, theirs, w_panel, depth, out + row * stride, stride, at, line, 0)
                row += 2
            if row < rows:
                line = mine + row * x_stride
                one(line, x_stride, theirs, w_panel, depth, out + row * stride, stride, at, line, 0)

    return njit(multiply)


@cache
def _rows_by_some_panels(kind: Kind) -> Any:
    """Return the product of any number of rows and the panels from one to another, as a compiled function."""
    if kind == "amx":
        from pallas_kernels.bfloat16_matmul.cpu_amx import multiply_by_amx

        return multiply_by_amx()
    together = KINDS[kind].panels
    whole, single = _rows_by_panels(kind, together), _rows_by_panels(kind, 1)

    def multiply(x, x_stride, rows, matrix, pairs, panel, stop, to, outputs, scratch):
        w_panel, stride = pairs * TILE_BYTES, outputs * FLOAT
        while panel < stop:
            w, out, width = matrix + panel * w_panel, to + panel * TILE_BYTES, outputs - panel * LANES
            if stop - panel >= together and width >= together * LANES:
                whole(x, x_stride, rows, w, w_panel, pairs, out, stride)
                panel += together
            elif width >= LANES:
                single(x, x_stride, rows, w, w_panel, pairs, out, stride)
                panel += 1
            else:
                for row in range(rows):
                    single(x + row * x_stride, x_stride, 1, w, w_panel, pairs, scratch, 0)
                    copy_numbers(scratch, out + row * stride, width)
                panel += 1

    return njit(multiply)


@cache
def _rows_by_experts(kind: Kind) -> Any:
    """Return the product of experts' rows and their panels, as a compiled function, see `over_experts`."""
    some_panels = _rows_by_some_panels(kind)

    @njit
    def multiply(operands, expert, row, number, panel, stop, to, outputs):
        x, x_stride, table, panels, pairs = operands
        matrix, mine = table + expert * panels * pairs * TILE_BYTES, x + row * x_stride
        some_panels(mine, x_stride, number, matrix, pairs, panel, stop, to, outputs, stack_memory(TILE_BYTES))

    return over_experts(multiply)


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _round_rows_to_bfloat16(frame, begin, end):
    """Round rows `begin` to `end`."""
    first, numbers = argument(frame, 0), result(frame, 1)
    inputs, stride = dimension(first, 1), 2 * dimension(numbers, 1)
    wanted = carray(data(argument(frame, 1)), (2,), np.int32)[1]
    for row in range(begin, min(end, wanted)):
        rounded_row(address(first) + row * inputs * FLOAT, inputs, address(numbers) + row * stride)


def _multiply(frame, begin, end):
    """Multiply with the panels of items `begin` to `end`."""
    index, wanted = carray(data(argument(frame, 1)), (2,), np.int32)
    matrix, numbers, to = argument(frame, 2 + index), result(frame, 1), result(frame, 0)
    rows, outputs, panels, pairs = dimension(to, 0), dimension(to, 1), dimension(matrix, 0), dimension(matrix, 1)
    x, x_stride, live = address(numbers), 2 * dimension(numbers, 1), min(rows, wanted)
    scratch = stack_memory(TILE_BYTES)
    panel, stop = begin * _panels_of_an_item, min(end * _panels_of_an_item, panels)
    if live < rows:
        clear_columns(address(to), live, rows, panel * LANES, min(stop * LANES, outputs), outputs)
    _some_panels(x, x_stride, live, address(matrix), pairs, panel, stop, address(to), outputs, scratch)


def _multiply_grouped(frame, begin, end):
    """Multiply experts' rows with the panels of items `begin` to `end`."""
    table, numbers, to = argument(frame, 2), result(frame, 1), result(frame, 0)
    experts, panels, pairs = dimension(table, 0), dimension(table, 1), dimension(table, 2)
    counts = carray(data(argument(frame, 3)), (experts,), np.int32)
    operands = address(numbers), 2 * dimension(numbers, 1), address(table), panels, pairs
    _over_experts(begin, end, counts, panels, dimension(to, 0), address(to), dimension(to, 1), operands)
