"""Multiplies many rounded rows with panels of 8-bit codes by Intel's AMX, a processor's unit for products of tiles.

A panel is already what AMX reads: the codes of a group are one of its tiles, 4 inputs by 16 outputs in each row. A step
multiplies 16 rows with a group, whose integers go through memory to vector registers, are scaled there and added to the
16 rows' totals::

    tile 4: 16 rows of x, a group's numbers, signed      tile 6: the group's codes, unsigned, a row for 4 inputs
    tile 0: 16 rows by 16 outputs, int32                 -> 16 registers of float32 totals

Integers have no order of addition and the rest is `cpu_tiles.scaled_group`, so a row has the bits that the products of
few rows give it. The last 16 rows are multiplied together, whichever of them were before.

Loops, outermost first: 16 rows; panels; groups.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.cpu_amx import CONFIG_BYTES, TILE_ROWS, TileCode, configure, release
from pallas_kernels.cpu_dots import FLOATS, INTS
from pallas_kernels.cpu_tiles import stack_memory
from pallas_kernels.ffi.loops import njit
from pallas_kernels.ffi.primitives import emit_prefetch, store
from pallas_kernels.tiled import INPUTS
from pallas_kernels.tiled_matmul.cpu_tiles import TILE_BYTES, repeated, scaled_group, scales_at
from pallas_kernels.tiled_matmul.variant import TileVariant

_SUMS, _ROWS, _CODES = 0, 4, 6
"""Numbers of the tiles."""
_ROOM = TILE_BYTES + CONFIG_BYTES + TILE_ROWS * TILE_BYTES
"""A thread's own memory, in whole cache lines: sizes of tiles, and the integers of a group."""
_WORD = ir.IntType(64)


@njit
def write_sizes(to, quads):
    """Write the sizes of AMX's tiles for groups of so many of a panel's tiles, each of which is a row of AMX's."""
    for place in range(0, CONFIG_BYTES, 8):
        store(to + place, 0)
    store(to, 1)
    store(to + 16, TILE_BYTES)
    store(to + 24, INPUTS * quads | TILE_BYTES << 32)
    store(to + 48, TILE_ROWS | TILE_ROWS << 32 | quads << 48)


def rows_by_amx(variant: TileVariant, panels: int) -> Any:
    """Return the product of `TILE_ROWS` rows or more and so many panels, as a compiled function; its arguments are
    those of `cpu_tiles.product`, with `rows` after the rows' factors and without `more`."""
    product = tile_product(variant)

    @njit
    def multiply(x, x_stride, f, f_stride, rows, w, w_panel, scales, least, s_panel, groups, quads, out, stride):
        own = stack_memory(_ROOM)
        own += -own % TILE_BYTES
        write_sizes(own, quads)
        configure(own)
        row = 0
        while row < rows:
            row = min(row, rows - TILE_ROWS)
            mine, factors, to = x + row * x_stride, f + row * f_stride, out + row * stride
            for panel in range(panels):
                codes, s, less = w + panel * w_panel, scales + panel * s_panel, least + panel * s_panel
                # The first rows fetch the panels that follow.
                coming = codes + panels * w_panel if row == 0 else 0
                theirs, aside = to + panel * TILE_BYTES, own + CONFIG_BYTES
                product(mine, x_stride, factors, f_stride, codes, s, less, groups, quads, theirs, stride, aside, coming)
            row += TILE_ROWS
        release()

    return multiply


def tile_product(variant: TileVariant) -> Any:
    """Return ``f(x, x_stride, factors, factors_stride, w, scales, minimums, groups, quads, out, out_stride, aside,
    coming)``, to be called from compiled loops.

    out [16 rows, 16], float32, gets the product of 16 rows and a panel. The tiles are configured before, see
    `write_sizes`; `aside` is memory for one. If `coming` is not 0, as many bytes as a panel has are fetched from there.
    """

    @intrinsic
    def product(typingctx, x, x_stride, f, f_stride, w, scales, least, groups, quads, out, out_stride, aside, coming):
        def generate(context, builder, signature, args):
            emit_tile_product(TileCode(builder), variant, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 13), generate

    return product


def emit_tile_product(emit: TileCode, variant: TileVariant, *arguments: ir.Value) -> None:
    """Append the instructions of `tile_product`."""
    x, x_stride, factors, factors_stride, w, scales, minimums, groups, quads, *places = arguments
    out, out_stride, aside, coming = places
    builder, line = emit.builder, ir.Constant(_WORD, TILE_BYTES)
    factor_rows = [emit.at(factors, emit.times(factors_stride, row)) for row in range(TILE_ROWS)]
    fetches = builder.icmp_signed("!=", coming, ir.Constant(_WORD, 0))

    def one_group(group: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        first = builder.mul(group, quads)
        codes = emit.times(first, TILE_BYTES)
        with builder.if_then(fetches):
            for row in range(TILE_ROWS):
                emit_prefetch(builder, emit.at(coming, codes, row * TILE_BYTES))
        emit.tile("tilezero", _SUMS)
        emit.load_tile(_ROWS, emit.at(x, emit.times(first, INPUTS)), x_stride)
        emit.load_tile(_CODES, emit.at(w, codes), line)
        emit.tile("tdpbsud", _SUMS, _ROWS, _CODES)
        emit.store_tile(_SUMS, aside, line)
        sums = [emit.load(emit.at(aside, row * TILE_BYTES), INTS) for row in range(TILE_ROWS)]
        at = emit.times(group, 16 * variant.scale_bytes)
        theirs = [emit.at(scales, at)], [emit.at(minimums, at)]
        return scaled_group(emit, variant, sums, totals, factor_rows, group, *theirs, made_up=False)

    results = repeated(emit, groups, [emit.constant(FLOATS, 0.0)] * TILE_ROWS, one_group)
    if variant.shared:
        of_panel = scales_at(emit, scales, variant)
        results = [builder.fmul(value, of_panel) for value in results]
    for row, result in enumerate(results):
        emit.store(result, emit.at(out, emit.times(out_stride, row)))
