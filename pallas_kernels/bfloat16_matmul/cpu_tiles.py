"""Multiplies a few rows of bfloat16 numbers with a few panels of tiles, every sum in a register; rounds such rows."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.bfloat16_matmul.cpu_pairs import KINDS, Kind
from pallas_kernels.cpu_dots import FLOATS, INTS, Emitter, vector
from pallas_kernels.ffi.primitives import emit_prefetch
from pallas_kernels.tiled_floats import WHOLE_ROWS
from pallas_kernels.tiled_matmul.cpu_tiles import FLOAT, TILE_BYTES, repeated

_SHORT, _WORD, _INT = ir.IntType(16), ir.IntType(64), ir.IntType(32)
PAIR = 4
"""Bytes of two numbers."""
LANES = 16


def product(kind: Kind, rows: int, panels: int) -> Any:
    """Return ``f(x, x_stride, w, w_panel, pairs, out, out_stride, more, coming, step)``, to be called from compiled
    loops.

    out [rows, panels * 16], float32, gets the product of some rows and panels, or has it added where `more` is not 0.
    Strides and ``w_panel``, from one panel to the next, are bytes; `pairs` are the tiles of a panel to take.
    With each of them the cache line at `coming` is fetched, which lies `step` bytes further each time.
    """

    @intrinsic
    def tile(typingctx, x, x_stride, w, w_panel, pairs, out, out_stride, more, coming, step):
        def generate(context, builder, signature, args):
            emit_product(Emitter(builder), kind, rows, panels, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 10), generate

    return tile


def emit_product(emit: Emitter, kind: Kind, rows: int, panels: int, *arguments: ir.Value) -> None:
    """Append the instructions of `product`."""
    x, x_stride, w, w_panel, pairs, out, out_stride, more, coming, step = arguments
    builder, how = emit.builder, KINDS[kind]
    x_rows = [emit.at(x, emit.times(x_stride, row)) for row in range(rows)]
    w_panels = [emit.at(w, emit.times(w_panel, panel)) for panel in range(panels)]
    places = [
        emit.at(out, emit.times(out_stride, row), panel * LANES * FLOAT)
        for row in range(rows)
        for panel in range(panels)
    ]
    adds = builder.icmp_signed("!=", more, ir.Constant(_WORD, 0))
    size = LANES // how.pieces

    def before(place: ir.Value) -> list[ir.Value]:
        """Return what `out` has at a place, or zeros, in the registers of its sums."""
        there = builder.select(adds, emit.load(place, FLOATS), emit.constant(FLOATS, 0.0))
        return [there] if size == LANES else [emit.pick(there, range(at, at + size)) for at in range(0, LANES, size)]

    def one_pair(number: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        at = emit.times(number, TILE_BYTES)
        emit_prefetch(builder, emit.at(coming, builder.mul(number, step)))
        tiles = [how.tile(emit, emit.at(panel, at)) for panel in w_panels]
        found = []
        for row, x_row in enumerate(x_rows):
            pair = how.pair(emit, emit.at(x_row, emit.times(number, PAIR)))
            for panel, tile in enumerate(tiles):
                place = (row * panels + panel) * how.pieces
                found += how.add(emit, sums[place : place + how.pieces], tile, pair)
        return found

    start = [piece for place in places for piece in before(place)]
    sums = repeated(emit, pairs, start, one_pair)
    for number, place in enumerate(places):
        emit.store(emit.joined(sums[number * how.pieces : (number + 1) * how.pieces]), place)


@intrinsic
def rounded_row(typingctx, x, count, to):
    """Write `count` float32 numbers at x, rounded to the nearest bfloat16, to an address, and zeros up to a multiple of
    `WHOLE_ROWS`; numbers halfway between two become the even one."""

    def generate(context, builder, signature, args):
        emit_rounding(Emitter(builder), *args)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


def emit_rounding(emit: Emitter, x: ir.Value, count: ir.Value, to: ir.Value) -> None:
    """Append the instructions of `rounded_row`; they are integers', so that every machine gives the same bits."""
    builder = emit.builder
    turns = emit.times(
        builder.sdiv(emit.at(count, WHOLE_ROWS - 1), ir.Constant(_WORD, WHOLE_ROWS)), WHOLE_ROWS // LANES
    )
    lanes = ir.Constant(vector(_WORD, LANES), list(range(LANES)))

    def number(value: int) -> ir.Constant:
        return emit.constant(INTS, value)

    def one_turn(turn: ir.Value, unchanged: list[ir.Value]) -> list[ir.Value]:
        left = emit.spread(builder.sub(count, emit.times(turn, LANES)), LANES)
        there = builder.icmp_signed("<", lanes, left)
        address = builder.inttoptr(emit.at(x, emit.times(turn, LANES * FLOAT)), FLOATS.as_pointer())
        zero = emit.constant(FLOATS, 0.0)
        read = emit.call("llvm.masked.load.v16f32.p0", FLOATS, [address, ir.Constant(_INT, 4), there, zero])
        bits = builder.bitcast(read, INTS)
        upper = builder.lshr(bits, number(16))
        even = builder.add(builder.and_(upper, number(1)), number(0x7FFF))
        near = builder.lshr(builder.add(bits, even), number(16))
        held = builder.select(builder.fcmp_unordered("uno", read, read), builder.or_(upper, number(0x40)), near)
        emit.store(builder.trunc(held, vector(_SHORT, LANES)), emit.at(to, emit.times(turn, LANES * 2)))
        return unchanged

    repeated(emit, turns, [], one_turn)
