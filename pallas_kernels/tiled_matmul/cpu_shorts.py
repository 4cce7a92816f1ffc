"""Multiplies many rows with panels of 8-bit codes that are widened to 16 bits once for all of them.

AVX2 has no product of 8-bit numbers whose sums it does not saturate, but one of 16 bits, which adds up pairs. Codes
wait widened in the first caches, some groups of inputs at a time; what they give is added to the result group by group,
in the order of the products that widen in registers, so that a row's bits are the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.cpu_dots import INTS, SHORTS, Emitter, vector
from pallas_kernels.cpu_tiles import stack_memory
from pallas_kernels.ffi.loops import njit
from pallas_kernels.tiled_matmul.cpu_tiles import ADDS, FACTORS, TILE_BYTES, UNFINISHED, product, repeated
from pallas_kernels.tiled_matmul.variant import TileVariant

_SHORTS = vector(ir.IntType(16), 32)
ROWS = 4
"""Rows that are multiplied at once: with six, whose sums would fill the registers, nothing is faster."""
PAIR = 4
"""Bytes of two of a row's numbers."""
DEPTH = 512
"""Inputs that are widened at once: of three panels 48 KiB."""
PANEL_BYTES = DEPTH // 2 * TILE_BYTES


def rows_by_widened_panels(variant: TileVariant, panels: int) -> Any:
    """Return the product of any number of rows and so many panels, as a compiled function; its arguments are those of
    `product`, with `rows` after the rows' factors and without `more`."""
    wide, widen = replace(variant, kind=SHORTS.kind, offset=0), widening(variant)
    several, single = _rows_by_all(wide, ROWS, panels), _rows_by_all(wide, 1, panels)
    room = panels * PANEL_BYTES
    scales_of_group = 0 if variant.shared else 16 * variant.scale_bytes
    least_of_group = 16 * variant.scale_bytes

    def multiply(x, x_stride, f, f_stride, rows, w, w_panel, scales, least, s_panel, groups, quads, out, stride):
        aside, pairs = stack_memory(room), 2 * quads
        at_once = DEPTH // (2 * pairs)
        for group in range(0, groups, at_once):
            some = min(at_once, groups - group)
            more = (ADDS if group > 0 else 0) + (UNFINISHED if group + some < groups else 0)
            for panel in range(panels):
                widen(w + panel * w_panel + group * quads * TILE_BYTES, some * quads, aside + panel * PANEL_BYTES)
            mine, factors, to = x + group * pairs * PAIR, f + group * FACTORS, out
            s, least_here, row = scales + group * scales_of_group, least + group * least_of_group, 0
            while rows - row >= ROWS:
                several(mine, x_stride, factors, f_stride, aside, s, least_here, s_panel, some, pairs, to, stride, more)
                mine, factors, to, row = (
                    mine + ROWS * x_stride,
                    factors + ROWS * f_stride,
                    to + ROWS * stride,
                    row + ROWS,
                )
            while row < rows:
                single(mine, x_stride, factors, f_stride, aside, s, least_here, s_panel, some, pairs, to, stride, more)
                mine, factors, to, row = mine + x_stride, factors + f_stride, to + stride, row + 1

    return njit(multiply)


def _rows_by_all(wide: TileVariant, rows: int, panels: int) -> Any:
    """Return the product of so many rows and all widened panels, as a compiled function."""
    one = product(wide, rows, 1)

    @njit
    def by_all(x, x_stride, f, f_stride, aside, scales, least, s_panel, groups, pairs, out, stride, more):
        for _ in range(panels):
            one(x, x_stride, f, f_stride, aside, 0, scales, least, 0, groups, pairs, out, stride, more, x, 0)
            aside, scales, least, out = aside + PANEL_BYTES, scales + s_panel, least + s_panel, out + TILE_BYTES

    return by_all


def widening(variant: TileVariant) -> Any:
    """Return ``f(w, quads, aside)``, to be called from compiled loops.

    It writes the codes of so many tiles of a panel, at w, as tiles of `SHORTS`: 16 outputs by 2 inputs of 16 bits, in
    the order of the inputs, without the variant's offset.
    """

    @intrinsic
    def widen(typingctx, w, quads, aside):
        def generate(context, builder, signature, args):
            emit_widening(Emitter(builder), variant, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 3), generate

    return widen


def emit_widening(emit: Emitter, variant: TileVariant, *arguments: ir.Value) -> None:
    """Append the instructions of `widening`."""
    w, quads, aside = arguments
    builder = emit.builder

    def number(value: int) -> ir.Constant:
        return emit.constant(INTS, value)

    def store(low: ir.Value, high: ir.Value, to: ir.Value) -> None:
        """Store pairs of numbers, each in 16 bits."""
        shorts = builder.bitcast(builder.or_(low, high), _SHORTS)
        emit.store(builder.sub(shorts, emit.constant(_SHORTS, variant.offset)) if variant.offset else shorts, to)

    def one_tile(quad: ir.Value, unchanged: list[ir.Value]) -> list[ir.Value]:
        codes = emit.load(emit.at(w, emit.times(quad, TILE_BYTES)), INTS)
        to = emit.at(aside, emit.times(quad, 2 * TILE_BYTES))
        # An output's four bytes are two pairs of inputs.
        second = builder.and_(codes, number(0xFF00))
        store(builder.and_(codes, number(0xFF)), builder.shl(second, number(8)), to)
        third, fourth = builder.and_(codes, number(0xFF0000)), builder.lshr(codes, number(24))
        store(builder.lshr(third, number(16)), builder.shl(fourth, number(16)), emit.at(to, TILE_BYTES))
        return unchanged

    repeated(emit, quads, [], one_tile)
