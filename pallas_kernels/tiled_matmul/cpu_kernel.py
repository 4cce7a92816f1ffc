"""Holds the loops that multiply with tiled matrices, compiled by Numba for each variant that is met.

Memory. A call first rounds all rows to 8 bits, each once, into buffers that XLA gives it: numbers [rows, inputs], and
for each group of inputs three factors (`FACTORS`); all threads wait for the last row. Codes, scales and minimums lie in
panels of 16 outputs (`pallas_kernels.tiled`) and are read once.

Loops. Some panels are an item of work; inside, tiles of rows, and in these the product of `cpu_tiles`, which walks over
the inputs. The panels that follow are prefetched, a line a tile. Rows do not meet: a row's result depends on it and on
the matrix only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from pallas_kernels import ffi
from pallas_kernels.cpu_dots import FLOATS, INTS, Emitter, vector
from pallas_kernels.cpu_panels import GRAINS_OF_EXPERTS, clear_columns, copy_numbers, over_experts
from pallas_kernels.cpu_tiles import stack_memory
from pallas_kernels.ffi import address, argument, arguments, data, dimension, result
from pallas_kernels.ffi.loops import njit, with_names
from pallas_kernels.tiled import OUTPUTS
from pallas_kernels.tiled_matmul.cpu_amx import TILE_ROWS, rows_by_amx
from pallas_kernels.tiled_matmul.cpu_shorts import rows_by_widened_panels
from pallas_kernels.tiled_matmul.cpu_tiles import FACTORS, FLOAT, TILE_BYTES, product, repeated
from pallas_kernels.tiled_matmul.variant import TileVariant

_WORD, _INT, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
_NUMBERS = {1: ir.IntType(8), 2: ir.IntType(16)}
"""LLVM's type of a row's rounded number, by its bytes."""
_LANES = 16
SMALLEST = 1e-30
"""Groups in which no number is larger are taken as 0: the inverse of their scale may have no number."""


def rounding(variant: TileVariant) -> Any:
    """Return ``f(x, count, numbers, factors)``, to be called from compiled loops.

    `numbers` gets `count` float32 numbers of x rounded to ``x / scale`` from -127 to 127, each in as many bytes as the
    variant's products read, and zeros up to a multiple of 16; `factors` gets what `FACTORS` says, the scale being the
    largest number's share of 127.
    """

    @intrinsic
    def rounded(typingctx, x, count, numbers, factors):
        def generate(context, builder, signature, args):
            emit_rounding(Emitter(builder), variant, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), generate

    return rounded


def emit_rounding(
    emit: Emitter, variant: TileVariant, x: ir.Value, count: ir.Value, numbers: ir.Value, factors: ir.Value
) -> None:
    """Append the instructions of `rounding`."""
    builder = emit.builder
    bytes_of_one = variant.number_bytes
    held = vector(_NUMBERS[bytes_of_one], _LANES)
    turns = builder.sdiv(emit.at(count, _LANES - 1), ir.Constant(_WORD, _LANES))
    places = ir.Constant(vector(_WORD, _LANES), list(range(_LANES)))

    def read(turn: ir.Value) -> ir.Value:
        """Return the numbers of a turn, 0 after the last."""
        left = emit.spread(builder.sub(count, emit.times(turn, _LANES)), _LANES)
        there = builder.icmp_signed("<", places, left)
        address = builder.inttoptr(emit.at(x, emit.times(turn, _LANES * FLOAT)), FLOATS.as_pointer())
        name, zero = "llvm.masked.load.v16f32.p0", emit.constant(FLOATS, 0.0)
        return emit.call(name, FLOATS, [address, ir.Constant(_INT, 4), there, zero])

    def larger(turn: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
        size = emit.call("llvm.fabs.v16f32", FLOATS, [read(turn)])
        return [builder.select(builder.fcmp_ordered(">", size, found[0]), size, found[0])]

    (largest,) = repeated(emit, turns, [emit.constant(FLOATS, 0.0)], larger)
    while largest.type.count > 1:
        half = largest.type.count // 2
        low, high = emit.pick(largest, range(half)), emit.pick(largest, range(half, 2 * half))
        largest = builder.select(builder.fcmp_ordered(">", high, low), high, low)
    top = builder.extract_element(largest, ir.Constant(_INT, 0))
    zero = ir.Constant(_FLOAT, 0.0)
    counts = builder.fcmp_ordered(">", top, ir.Constant(_FLOAT, SMALLEST))
    scale = builder.select(counts, builder.fdiv(top, ir.Constant(_FLOAT, 127.0)), zero)
    inverse = builder.select(counts, builder.fdiv(ir.Constant(_FLOAT, 127.0), top), zero)
    factor = emit.spread(inverse, _LANES)

    def round_and_add(turn: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
        near = emit.call("llvm.rint.v16f32", FLOATS, [builder.fmul(read(turn), factor)])
        whole = builder.fptosi(near, INTS)
        emit.store(builder.trunc(whole, held), emit.at(numbers, emit.times(turn, _LANES * bytes_of_one)))
        return [builder.add(found[0], whole)]

    (sums,) = repeated(emit, turns, [emit.constant(INTS, 0)], round_and_add)
    while sums.type.count > 1:
        half = sums.type.count // 2
        sums = builder.add(emit.pick(sums, range(half)), emit.pick(sums, range(half, 2 * half)))
    total = builder.extract_element(sums, ir.Constant(_INT, 0))
    emit.store(scale, factors)
    emit.store(builder.mul(total, ir.Constant(_INT, -variant.offset)), emit.at(factors, FLOAT))
    emit.store(builder.fmul(scale, builder.sitofp(total, _FLOAT)), emit.at(factors, 2 * FLOAT))


GRAINS = 4
"""Portions of a thread."""
MOST_AS_THEY_ARE = 4
"""Rows that are not worth widening a panel for."""


_rounded: Any = None
_some_panels: Any = None
_over_experts: Any = None
"""Stand for what `_loop` puts in their places: for each variant, how rows are rounded and multiplied."""
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
    run, first = _loops(_multiply, variant)
    portion = variant.tiles[1]
    ffi.register(name, run, items_of=((2, 0),), portion=portion, grains=GRAINS, before=(first, 0, 0))
    return name


@ffi.known_again
def grouped_target(variant: TileVariant) -> str:
    """Return the name of the custom call ``(x, [0, rows], codes, scales, [minimums], counts) -> (each row times its
    expert's matrix, rounded x, factors of its groups)``.

    x: sorted by expert; codes, scales and minimums have an axis of experts before the others; counts: int32 [experts].
    The rest is as for `target`. Rows of no expert give 0, and matrices without rows are not read.
    """
    name = f"jpaged_tiled_experts_{variant.name}"
    run, first = _loops(_multiply_grouped, variant)
    ffi.register(name, run, items_of=((2, 0), (2, 1)), grains=GRAINS_OF_EXPERTS, before=(first, 0, 0))
    return name


def _loops(multiply: Any, variant: TileVariant) -> tuple[Any, Any]:
    """Return the loops that multiply and that round before, for a variant."""
    names = {
        "_panels_of_an_item": variant.tiles[1],
        "_has_minimums": variant.minimums,
        "_scale_bytes": variant.scale_bytes,
        "_some_panels": _rows_by_some_panels(variant),
        "_over_experts": _rows_by_experts(variant),
    }
    rounds = {"_rounded": rounding(variant), "_number_bytes": variant.number_bytes}
    return _loop(multiply, names), _loop(_round, rounds)


def _loop(function: Any, names: dict[str, Any]) -> Any:
    """Return a function, compiled with these global names besides its module's."""
    return ffi.cfunc(ffi.RUN, error_model="numpy")(with_names(function, names))


def _rows_by_panels(variant: TileVariant, panels: int) -> Any:
    """Return the product of any number of rows and so many panels, as a compiled function."""
    most, together = variant.tiles[0][0], 1 if variant.widens else panels
    full, one = product(variant, most, together), product(variant, 1, together)
    # Numba compiles both branches, so give it a no-op where many rows are multiplied as few are.
    many, fewest = _noop, 0
    if variant.widens:
        many, fewest = rows_by_widened_panels(variant, panels), MOST_AS_THEY_ARE + 1
    elif variant.kind == "amx":
        many, fewest = rows_by_amx(variant, panels), TILE_ROWS

    def multiply(x, x_stride, f, f_stride, rows, w, w_panel, scales, least, s_panel, groups, quads, out, stride):
        if fewest and rows >= fewest:
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

    return njit(multiply)


@cache
def _rows_by_some_panels(variant: TileVariant) -> Any:
    """Return the product of any number of rows and the panels from one to another, as a compiled function."""
    at_once = variant.tiles[1]
    whole, single = _rows_by_panels(variant, at_once), _rows_by_panels(variant, 1)

    def multiply(numbers, matrix, panel, stop, to, outputs, scratch):
        """Multiply with the panels from `panel` to `stop`, `at_once` of them where there are as many.

        Args:
            numbers: address and stride of the rounded rows, of their factors, and the number of rows.
            matrix: addresses of its first panel's codes, scales and minimums; the bytes of a panel's codes and of its
                scales; the groups, and the tiles of a group.
            to: address of the result [rows, outputs].
            scratch: address of `TILE_BYTES` for a panel whose outputs are fewer than 16.
        """
        x, x_stride, f, f_stride, rows = numbers
        codes, scales, least, w_panel, s_panel, groups, quads = matrix
        stride = outputs * FLOAT
        while panel < stop:
            w, s, less = codes + panel * w_panel, scales + panel * s_panel, least + panel * s_panel
            out, width = to + panel * TILE_BYTES, min(OUTPUTS, outputs - panel * OUTPUTS)
            if panel + at_once <= min(stop, outputs // OUTPUTS):
                whole(x, x_stride, f, f_stride, rows, w, w_panel, s, less, s_panel, groups, quads, out, stride)
                panel += at_once
            elif width == OUTPUTS:
                single(x, x_stride, f, f_stride, rows, w, w_panel, s, less, s_panel, groups, quads, out, stride)
                panel += 1
            else:
                for row in range(rows):
                    mine, factor = x + row * x_stride, f + row * f_stride
                    single(mine, x_stride, factor, f_stride, 1, w, w_panel, s, less, s_panel, groups, quads, scratch, 0)
                    copy_numbers(scratch, out + row * stride, width)
                panel += 1

    return njit(multiply)


@cache
def _rows_by_experts(variant: TileVariant) -> Any:
    """Return the product of experts' rows and their panels, as a compiled function, see `over_experts`."""
    some_panels = _rows_by_some_panels(variant)

    @njit
    def multiply(operands, expert, row, number, panel, stop, to, outputs):
        (x, x_stride, f, f_stride, _), (codes, scales, least, w_panel, s_panel, groups, quads), panels = operands
        numbers, before = (x + row * x_stride, x_stride, f + row * f_stride, f_stride, number), expert * panels
        w, s, less = codes + before * w_panel, scales + before * s_panel, least + before * s_panel
        matrix = (w, s, less, w_panel, s_panel, groups, quads)
        some_panels(numbers, matrix, panel, stop, to, outputs, stack_memory(TILE_BYTES))

    return over_experts(multiply)


@njit
def _noop(x, x_stride, f, f_stride, rows, w, w_panel, scales, least, s_panel, groups, quads, out, stride):
    """Stand where a variant has no other way for many rows."""


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
    codes, scales, to = argument(frame, 2 + index), argument(frame, 2 + matrices + index), result(frame, 0)
    least = address(argument(frame, 2 + 2 * matrices + index)) if _has_minimums else 0
    rows, outputs, panels, groups = dimension(to, 0), dimension(to, 1), dimension(codes, 0), _groups(frame)
    live, panel, stop = min(rows, wanted), begin * _panels_of_an_item, min(end * _panels_of_an_item, panels)
    if live < rows:
        clear_columns(address(to), live, rows, panel * OUTPUTS, min(stop * OUTPUTS, outputs), outputs)
    w_panel, s_panel = dimension(codes, 1) * TILE_BYTES, dimension(scales, 1) * OUTPUTS * _scale_bytes
    matrix = (address(codes), address(scales), least, w_panel, s_panel, groups, dimension(codes, 1) // groups)
    _some_panels(_numbers(frame, live), matrix, panel, stop, address(to), outputs, stack_memory(TILE_BYTES))


def _multiply_grouped(frame, begin, end):
    """Multiply experts' rows with the panels of items `begin` to `end`."""
    codes, scales, to = argument(frame, 2), argument(frame, 3), result(frame, 0)
    least = address(argument(frame, 4)) if _has_minimums else 0
    experts, panels, groups = dimension(codes, 0), dimension(codes, 1), _groups(frame)
    counts = carray(data(argument(frame, 5 if _has_minimums else 4)), (experts,), np.int32)
    w_panel, s_panel = dimension(codes, 2) * TILE_BYTES, dimension(scales, 2) * OUTPUTS * _scale_bytes
    table = (address(codes), address(scales), least, w_panel, s_panel, groups, dimension(codes, 2) // groups)
    rows, outputs = dimension(to, 0), dimension(to, 1)
    operands = (_numbers(frame, rows), table, panels)
    _over_experts(begin, end, counts, panels, rows, address(to), outputs, operands)


@njit
def _groups(frame):
    """Return the groups of a row."""
    return dimension(result(frame, 2), 1)


@njit
def _numbers(frame, rows):
    """Return address and stride of the rounded rows, of their factors, and the number of rows."""
    numbers, factors = result(frame, 1), result(frame, 2)
    return address(numbers), dimension(numbers, 1), address(factors), _groups(frame) * FACTORS, rows
