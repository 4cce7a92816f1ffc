"""Multiplies a few rows of float32 numbers with a few panels of bfloat16 tiles, widened in registers, sums too.

A bfloat16 is the upper half of a float32 of the same value, so nothing is rounded but the products' sums, and these
are added up input by input, as `pallas_kernels.cpu_tiles` does.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.bfloat16_matmul.cpu_pairs import halves
from pallas_kernels.bfloat16_matmul.cpu_tiles import LANES
from pallas_kernels.cpu_dots import FLOATS, INTS, Emitter
from pallas_kernels.tiled_matmul.cpu_tiles import FLOAT, TILE_BYTES, repeated

_WORD, _FLOAT = ir.IntType(64), ir.FloatType()


def exact_product(rows: int, panels: int, *, aside_row: int = 0) -> Any:
    """Return ``f(x, x_stride, w, w_panel, pairs, out, out_stride, more, aside)``, to be called from compiled loops.

    out [rows, panels * 16], float32, gets the product of some rows, float32, and panels, or has it added where `more`
    is not 0. Strides and ``w_panel``, from one panel to the next, are bytes; `pairs` are the tiles of a panel to take.
    If `aside_row` is not 0, the widened panels are also written to `aside`: a row of all outputs per input, `aside_row`
    bytes apart.
    """

    @intrinsic
    def tile(typingctx, x, x_stride, w, w_panel, pairs, out, out_stride, more, aside):
        def generate(context, builder, signature, args):
            emit_exact_product(Emitter(builder), rows, panels, aside_row, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), generate

    return tile


def emit_exact_product(emit: Emitter, rows: int, panels: int, aside_row: int, *arguments: ir.Value) -> None:
    """Append the instructions of `exact_product`."""
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
                emit.store(tile[place], emit.at(beside, place * aside_row + panel * LANES * FLOAT))
            for row, x_row in enumerate(x_rows):
                address = emit.at(x_row, emit.times(number, 2 * FLOAT), place * FLOAT)
                numbers = emit.spread(emit.load(address, _FLOAT), LANES)
                for panel, tile in enumerate(tiles):
                    own = row * panels + panel
                    added[own] = emit.call("llvm.fma.v16f32", FLOATS, [numbers, tile[place], added[own]])
        return added

    sums = repeated(emit, pairs, [emit.constant(FLOATS, 0.0)] * (rows * panels), one_pair)
    adds = builder.icmp_signed("!=", more, ir.Constant(_WORD, 0))
    for row in range(rows):
        for panel in range(panels):
            to = emit.at(out, emit.times(out_stride, row), panel * LANES * FLOAT)
            total = sums[row * panels + panel]
            emit.store(builder.select(adds, builder.fadd(emit.load(to, FLOATS), total), total), to)
