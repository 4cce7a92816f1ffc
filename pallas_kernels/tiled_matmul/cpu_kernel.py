"""Holds the loops that multiply with tiled matrices, compiled by Numba for each variant that is met.

A call first rounds all rows, each once, into a buffer that XLA gives it; then each item is a few panels. Rows do not
meet: what a row gives depends on it and on the matrix only.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np
from numba import carray, njit

from pallas_kernels import ffi
from pallas_kernels.cpu_tiles import stack_memory
from pallas_kernels.ffi import address, argument, arguments, data, dimension, result
from pallas_kernels.ffi.primitives import pointer
from pallas_kernels.tiled import OUTPUTS
from pallas_kernels.tiled_matmul.cpu_rounding import rounding
from pallas_kernels.tiled_matmul.cpu_shorts import rows_by_widened_panels
from pallas_kernels.tiled_matmul.cpu_tiles import FACTORS, FLOAT, TILE_BYTES, TileVariant, product

GRAINS = 4
"""Portions of a thread."""
MOST_AS_THEY_ARE = 4
"""Rows that are not worth widening a panel for."""


_rounded: Any = None
_whole: Any = None
_single: Any = None
"""Stand for what `_bound` puts in their places: for each variant, how rows are rounded and multiplied."""
_panels_of_an_item: Any = None
_has_minimums: Any = None
_scale_bytes: Any = None
_number_bytes: Any = None


@ffi.known_again
def target(variant: TileVariant) -> str:
    """Return the name of the custom call ``(x, [index, wanted], codes..., scales..., minimums...) -> (x @ matrix,
    rounded x, factors of its groups)`` for matrices of one variant and shape, of which number `index` is meant.

    x: float32 [rows, inputs]. Results: float32 [rows, outputs], int8 [rows, `rounded_bytes`], float32 [rows, groups,
    3]. Only the first `wanted` rows are multiplied; the others give 0.
    """
    name = f"jpaged_tiled_{variant.name}"
    _, panels = variant.tiles
    names = {"_panels_of_an_item": panels, "_has_minimums": variant.minimums, "_scale_bytes": variant.scale_bytes}
    parts = {"_whole": _rows_by_panels(variant, panels), "_single": _rows_by_panels(variant, 1)}
    run = ffi.cfunc(ffi.RUN, error_model="numpy")(_bound(_multiply, name, **names, **parts))
    first = ffi.cfunc(ffi.RUN, error_model="numpy")(
        _bound(_round, name, _rounded=rounding(variant), _number_bytes=variant.dots.number_bytes)
    )
    ffi.register(name, run, items_of=((2, 0),), portion=panels, grains=GRAINS, before=(first, 0, 0))
    return name


def rounded_bytes(inputs: int, variant: TileVariant) -> int:
    """Return the bytes that a row's rounded numbers take: whole vectors, and one more."""
    return (-(-inputs // OUTPUTS) * OUTPUTS + OUTPUTS) * variant.dots.number_bytes


def _bound(function: Any, name: str, **names: Any) -> Any:
    """Return a function with these global names besides its module's, kept on disk under a separate name."""
    return ffi.named(FunctionType(function.__code__, function.__globals__ | names, function.__name__), name)


def _rows_by_panels(variant: TileVariant, panels: int) -> Any:
    """Return the product of any number of rows and so many panels, as a compiled function."""
    most, together = variant.tiles[0][0], 1 if variant.widens else panels
    full, one = product(variant, most, together), product(variant, 1, together)
    # Numba compiles both branches, so give it a no-op where the format has no widened path.
    many, widens = (rows_by_widened_panels(variant, panels), True) if variant.widens else (_nothing, False)

    def multiply(x, x_stride, f, f_stride, rows, w, w_panel, scales, least, s_panel, groups, quads, out, stride):
        if widens and rows > MOST_AS_THEY_ARE:
            many(x, x_stride, f, f_stride, rows, w, w_panel, scales, least, s_panel, groups, quads, out, stride)
            return
        coming, end = w + panels * w_panel, w + 2 * panels * w_panel
        for _ in range(0, panels, together):
            row, matrix = 0, (w, w_panel, scales, least, s_panel, groups, quads)
            while rows - row >= most:
                mine, factors, to = x + row * x_stride, f + row * f_stride, out + row * stride
                fetched = (coming, TILE_BYTES) if coming < end else (mine, 0)  # the panels that follow, each once
                full(mine, x_stride, factors, f_stride, *matrix, to, stride, 0, *fetched)
                row, coming = row + most, coming + w_panel
            while row < rows:
                mine, factors, to = x + row * x_stride, f + row * f_stride, out + row * stride
                one(mine, x_stride, factors, f_stride, *matrix, to, stride, 0, mine, 0)
                row += 1
            w, scales, least, out = w + w_panel, scales + s_panel, least + s_panel, out + OUTPUTS * FLOAT

    return njit(ffi.named(multiply, f"{variant.name}_{panels}"))


@njit
def _nothing(x, x_stride, f, f_stride, rows, w, w_panel, scales, least, s_panel, groups, quads, out, stride):
    """Stand where a variant widens nothing."""


def _round(frame, begin, end):
    """Round rows `begin` to `end`; a group's numbers follow one another."""
    first, numbers, factors = argument(frame, 0), result(frame, 1), result(frame, 2)
    inputs, stride, groups = dimension(first, 1), dimension(numbers, 1), dimension(factors, 1)
    wanted = carray(data(argument(frame, 1)), (2,), np.int32)[1]
    size = inputs // groups
    for row in range(begin, min(end, wanted)):
        x, to = address(first) + row * inputs * FLOAT, address(numbers) + row * stride
        beside = address(factors) + row * groups * FACTORS
        for group in range(groups):
            mine = to + group * size * _number_bytes
            _rounded(x + group * size * FLOAT, size, mine, beside + group * FACTORS)


def _multiply(frame, begin, end):
    """Multiply with the panels of items `begin` to `end`."""
    index, wanted = carray(data(argument(frame, 1)), (2,), np.int32)
    matrices = (arguments(frame) - 2) // (3 if _has_minimums else 2)
    codes, scales = argument(frame, 2 + index), argument(frame, 2 + matrices + index)
    numbers, factors = result(frame, 1), result(frame, 2)
    rows, outputs = dimension(result(frame, 0), 0), dimension(result(frame, 0), 1)
    groups, panels = dimension(factors, 1), dimension(codes, 0)
    x, x_stride, f, f_stride = address(numbers), dimension(numbers, 1), address(factors), groups * FACTORS
    w_panel, s_panel = dimension(codes, 1) * TILE_BYTES, dimension(scales, 1) * OUTPUTS * _scale_bytes
    quads, stride = dimension(codes, 1) // groups, outputs * FLOAT
    of_minimums = address(argument(frame, 2 + 2 * matrices + index)) if _has_minimums else 0
    scratch = stack_memory(TILE_BYTES)
    live = min(rows, wanted)
    for item in range(begin, end):
        panel, stop = item * _panels_of_an_item, min((item + 1) * _panels_of_an_item, panels)
        if live < rows:
            _clear(address(result(frame, 0)), live, rows, panel * OUTPUTS, min(stop * OUTPUTS, outputs), outputs)
        together = panel + _panels_of_an_item <= outputs // OUTPUTS
        while panel < stop:
            w, s, least = (
                address(codes) + panel * w_panel,
                address(scales) + panel * s_panel,
                of_minimums + panel * s_panel,
            )
            out, width = address(result(frame, 0)) + panel * TILE_BYTES, min(OUTPUTS, outputs - panel * OUTPUTS)
            if together:
                _whole(x, x_stride, f, f_stride, live, w, w_panel, s, least, s_panel, groups, quads, out, stride)
                panel = stop
            elif width == OUTPUTS:
                _single(x, x_stride, f, f_stride, live, w, w_panel, s, least, s_panel, groups, quads, out, stride)
                panel += 1
            else:
                for row in range(live):
                    mine, factor = x + row * x_stride, f + row * f_stride
                    _single(
                        mine, x_stride, factor, f_stride, 1, w, w_panel, s, least, s_panel, groups, quads, scratch, 0
                    )
                    whole, part = carray(pointer(scratch), (OUTPUTS,), np.float32), pointer(out + row * stride)
                    for column in range(width):
                        carray(part, (OUTPUTS,), np.float32)[column] = whole[column]
                panel += 1


@njit
def _clear(out, begin, end, first, last, outputs):
    """Zero some columns of the rows from `begin` to `end`."""
    numbers = carray(pointer(out), (end, outputs), np.float32)
    for row in range(begin, end):
        for column in range(first, last):
            numbers[row, column] = np.float32(0.0)
