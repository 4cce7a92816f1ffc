"""Multiplies float32 rows with bfloat16 matrices in tiles, widened in registers, in loops that Numba compiles.

A bfloat16 is the upper half of a float32 of the same value, so nothing is rounded but the sums of products. Every sum
is added up in the order of `pallas_kernels.matmul.cpu_kernel`, so that a matrix held so gives the bits that it would
give in float32.

Memory. A matrix is [panels, pairs, 16 outputs, 2 inputs]: a tile is a cache line of 64 bytes, a panel one run of
memory, and both are read once. Where many rows wait for a panel, the first of them leave it widened on the stack,
[inputs, `PANELS` * 16] of up to `DEPTH` inputs, which stays in the second cache for the others.

    tile (16 x 2 bfloat16) -> two vectors of 16 float32, the even and the odd input -> fma with a number of a row

Loops, from outside: panels, `PANELS` at a time, which are the items of work; `DEPTH` inputs; rows, `ROWS_AT_ONCE` at a
time; pairs of inputs, with every sum in a register.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from pallas_kernels import ffi
from pallas_kernels.bfloat16_matmul.cpu_pairs import halves
from pallas_kernels.bfloat16_matmul.cpu_tiles import LANES as OUTPUTS
from pallas_kernels.cpu_dots import FLOATS, INTS, Emitter
from pallas_kernels.cpu_features import FEATURES, LANES
from pallas_kernels.cpu_panels import GRAINS_OF_EXPERTS, clear_columns, copy_numbers, over_experts
from pallas_kernels.cpu_tiles import VECTORS, remaining_rows, stack_memory
from pallas_kernels.ffi import address, argument, data, dimension, result
from pallas_kernels.ffi.loops import njit
from pallas_kernels.matmul.cpu_kernel import DEPTH
from pallas_kernels.tiled_matmul.cpu_tiles import FLOAT, TILE_BYTES, repeated

_WORD, _FLOAT = ir.IntType(64), ir.FloatType()


def float32_product(rows: int, panels: int, *, aside_row: int = 0) -> Any:
    """Return ``f(x, x_stride, w, w_panel, pairs, out, out_stride, more, aside)``, to be called from compiled loops.

    out [rows, panels * 16], float32, gets the product of some rows, float32, and panels, or has it added where `more`
    is not 0. Strides and ``w_panel``, from one panel to the next, are bytes; `pairs` are the tiles of a panel to take.
    If `aside_row` is not 0, the widened panels are also written to `aside`: a row of all outputs per input, `aside_row`
    bytes apart.
    """

    @intrinsic
    def tile(typingctx, x, x_stride, w, w_panel, pairs, out, out_stride, more, aside):
        def generate(context, builder, signature, args):
            emit_float32_product(Emitter(builder), rows, panels, aside_row, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), generate

    return tile


def emit_float32_product(emit: Emitter, rows: int, panels: int, aside_row: int, *arguments: ir.Value) -> None:
    """Append the instructions of `float32_product`."""
    x, x_stride, w, w_panel, pairs, out, out_stride, more, aside = arguments
    builder = emit.builder
    x_rows = [emit.at(x, emit.times(x_stride, row)) for row in range(rows)]
    w_panels = [emit.at(w, emit.times(w_panel, panel)) for panel in range(panels)]

    def one_pair(number: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        at = emit.times(number, TILE_BYTES)
        tiles = [halves(emit, emit.load(emit.at(panel, at), INTS)) for panel in w_panels]
        beside = emit.at(aside, emit.times(number, 2 * aside_row))
        added = list(sums)
        for place in range(2):
            for panel, tile in enumerate(tiles if aside_row else ()):
                emit.store(tile[place], emit.at(beside, place * aside_row + panel * OUTPUTS * FLOAT))
            for row, x_row in enumerate(x_rows):
                address = emit.at(x_row, emit.times(number, 2 * FLOAT), place * FLOAT)
                numbers = emit.spread(emit.load(address, _FLOAT), OUTPUTS)
                for panel, tile in enumerate(tiles):
                    own = row * panels + panel
                    added[own] = emit.call("llvm.fma.v16f32", FLOATS, [numbers, tile[place], added[own]])
        return added

    sums = repeated(emit, pairs, [emit.constant(FLOATS, 0.0)] * (rows * panels), one_pair)
    adds = builder.icmp_signed("!=", more, ir.Constant(_WORD, 0))
    for row in range(rows):
        for panel in range(panels):
            to = emit.at(out, emit.times(out_stride, row), panel * OUTPUTS * FLOAT)
            total = sums[row * panels + panel]
            emit.store(builder.select(adds, builder.fadd(emit.load(to, FLOATS), total), total), to)


WIDE = bool(FEATURES.get("avx512f"))
"""True if one register holds a panel's 16 outputs."""
PANELS = 3
"""Panels that rows are multiplied with at once; of a single row they are as many as the memory delivers in the time
(2 to 8 panels, with and without prefetching, were within 10 % of one another on a Zen 5)."""
ROWS_AT_ONCE, TOGETHER = (8, PANELS) if WIDE else (4, 1)
"""Rows and panels whose sums fill the registers while matrices are widened there."""
GRAINS = 4
"""Portions of a thread."""
PACKED = DEPTH * PANELS * TILE_BYTES
"""Bytes of some panels, widened, of `DEPTH` inputs."""


@ffi.known_again
def float32_target() -> str:
    """Return the name of the custom call ``(x, [index, wanted], matrices...) -> x @ matrices[index]``.

    x: float32 [rows, inputs], with an even number of inputs; a matrix: uint16 [panels, pairs, 16, 2]. The result:
    float32 [rows, outputs]. Only the first `wanted` rows are multiplied; the others give 0.
    """
    name = "jpaged_bfloat16_float32_product"
    ffi.register(name, _multiply, items_of=((2, 0),), portion=PANELS, grains=GRAINS)
    return name


@ffi.known_again
def float32_grouped_target() -> str:
    """Return the name of the custom call ``(x, table, counts) -> each row times its expert's matrix``, rows of no
    expert 0.

    table: uint16 [experts, panels, pairs, 16, 2]; counts: int32 [experts]. The rest is as for `float32_target`.
    """
    name = "jpaged_bfloat16_float32_product_grouped"
    ffi.register(name, _multiply_grouped, items_of=((1, 0), (1, 1)), grains=GRAINS_OF_EXPERTS)
    return name


def _by_panels(panels: int) -> Any:
    """Return the product of any number of rows and so many panels, as a compiled function."""
    together, row_bytes = min(panels, TOGETHER), panels * TILE_BYTES
    first = float32_product(ROWS_AT_ONCE, together, aside_row=row_bytes)
    full, four, two = (float32_product(rows, together) for rows in (ROWS_AT_ONCE, 4, 2))
    one = float32_product(1, panels)
    vectors = panels * OUTPUTS // LANES
    width = VECTORS if vectors % VECTORS == 0 else 1
    of_packed = remaining_rows(width)
    groups, group_bytes = vectors // width, width * LANES * FLOAT

    @njit
    def multiply_packed(x, x_stride, rows, packed, depth, out, stride, more):
        for group in range(groups):
            w, to = packed + group * group_bytes, out + group * group_bytes
            of_packed(x, x_stride, 0, rows, w, row_bytes, depth, to, stride, more)

    @njit
    def multiply_some(x, x_stride, rows, w, w_panel, pairs, out, stride, more):
        row = 0
        while rows - row >= ROWS_AT_ONCE:
            full(x + row * x_stride, x_stride, w, w_panel, pairs, out + row * stride, stride, more, 0)
            row += ROWS_AT_ONCE
        while rows - row >= 4:
            four(x + row * x_stride, x_stride, w, w_panel, pairs, out + row * stride, stride, more, 0)
            row += 4
        while rows - row >= 2:
            two(x + row * x_stride, x_stride, w, w_panel, pairs, out + row * stride, stride, more, 0)
            row += 2
        return row

    def multiply(x, x_stride, rows, w, w_panel, inputs, out, stride, packed):
        for at in range(0, inputs, DEPTH):
            depth, row, mine = min(DEPTH, inputs - at), 0, x + at * FLOAT
            theirs, pairs = w + at // 2 * TILE_BYTES, depth // 2
            for panel in range(0, panels, together):
                own, to = theirs + panel * w_panel, out + panel * TILE_BYTES
                if rows > ROWS_AT_ONCE:
                    first(mine, x_stride, own, w_panel, pairs, to, stride, at, packed + panel * TILE_BYTES)
                    row = ROWS_AT_ONCE
                else:
                    row = multiply_some(mine, x_stride, rows, own, w_panel, pairs, to, stride, at)
            left, to = mine + row * x_stride, out + row * stride
            if rows > ROWS_AT_ONCE:
                multiply_packed(left, x_stride, rows - row, packed, depth, to, stride, at)
            elif row < rows:
                one(left, x_stride, theirs, w_panel, pairs, to, stride, at, 0)

    return njit(multiply)


_several, _single = _by_panels(PANELS), _by_panels(1)


@njit
def _some_panels(x, x_stride, rows, matrix, inputs, panel, stop, to, outputs, packed, scratch):
    """Multiply rows with the panels from one to another."""
    w_panel, stride = inputs // 2 * TILE_BYTES, outputs * FLOAT
    while panel < stop:
        w, out, width = matrix + panel * w_panel, to + panel * TILE_BYTES, outputs - panel * OUTPUTS
        left = min(stop - panel, width // OUTPUTS)
        if left >= PANELS:
            _several(x, x_stride, rows, w, w_panel, inputs, out, stride, packed)
            panel += PANELS
        elif left > 0:
            _single(x, x_stride, rows, w, w_panel, inputs, out, stride, packed)
            panel += 1
        else:
            for row in range(rows):
                _single(x + row * x_stride, x_stride, 1, w, w_panel, inputs, scratch, 0, packed)
                copy_numbers(scratch, out + row * stride, width)
            panel += 1


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _multiply(frame, begin, end):
    index, wanted = carray(data(argument(frame, 1)), (2,), np.int32)
    first, matrix, to = argument(frame, 0), argument(frame, 2 + index), result(frame, 0)
    rows, outputs, inputs, panels = dimension(to, 0), dimension(to, 1), dimension(first, 1), dimension(matrix, 0)
    live, packed, scratch = min(rows, wanted), stack_memory(PACKED), stack_memory(TILE_BYTES)
    panel, stop = begin * PANELS, min(end * PANELS, panels)
    if live < rows:
        clear_columns(address(to), live, rows, panel * OUTPUTS, min(stop * OUTPUTS, outputs), outputs)
    x, x_stride = address(first), inputs * FLOAT
    _some_panels(x, x_stride, live, address(matrix), inputs, panel, stop, address(to), outputs, packed, scratch)


@njit
def _experts_panels(operands, expert, row, number, panel, stop, to, outputs):
    """Multiply an expert's rows with some of its panels, see `over_experts`."""
    x, inputs, table, panels = operands
    matrix, mine = table + expert * panels * (inputs // 2) * TILE_BYTES, x + row * inputs * FLOAT
    packed, scratch = stack_memory(PACKED), stack_memory(TILE_BYTES)
    _some_panels(mine, inputs * FLOAT, number, matrix, inputs, panel, stop, to, outputs, packed, scratch)


_over_experts = over_experts(_experts_panels)


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _multiply_grouped(frame, begin, end):
    """Multiply experts' rows with the panels of items `begin` to `end`."""
    first, table, to = argument(frame, 0), argument(frame, 1), result(frame, 0)
    experts, panels = dimension(table, 0), dimension(table, 1)
    counts = carray(data(argument(frame, 2)), (experts,), np.int32)
    operands = address(first), dimension(first, 1), address(table), panels
    _over_experts(begin, end, counts, panels, dimension(to, 0), address(to), dimension(to, 1), operands)
