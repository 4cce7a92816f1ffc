"""Multiplies a few rows of rounded numbers with a few panels of a tiled matrix, every sum in a register.

Memory. Codes lie as [panels, quads, 16 outputs, 4 inputs], so a tile is one cache line of 64 bytes and a panel one run
of memory, which is read from end to end once for all rows of a call. x was rounded before, to int8 [rows, inputs] with
a scale for each group, and stays in the first-level cache.

    one tile:   64 codes (16 outputs x 4 inputs)  .  4 numbers of a row, repeated 16 times  ->  16 sums of int32

Loops, from outside: groups that share a scale; the tiles (quads) of a group; and unrolled, since registers have no
index: the halves of a byte, rows, panels. Sums are integers within a group and become floats, times both scales, at its
end.
A tile of 4 rows by 3 panels keeps 12 vectors of sums, which with the codes fill the 32 vector registers of AVX-512.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.cpu_dots import FLOATS, Emitter, vector
from pallas_kernels.ffi.primitives import emit_prefetch
from pallas_kernels.tiled_matmul.variant import TileVariant

_BYTE, _SHORT, _WORD, _INT, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(64), ir.IntType(32), ir.FloatType()
TILE_BYTES, FLOAT = 64, 4
FACTORS = 12
"""Bytes of a row's factors for a group: the scale, the integer that corrects for the codes' offset, and the factor of
the matrix' minimums."""
ADDS, UNFINISHED = 1, 2
"""Flags of a product of some of a row's groups: some are in the result already; others follow, and an output's scale
with them."""


def product(variant: TileVariant, rows: int, panels: int) -> Any:
    """Return ``f(x, x_stride, factors, factors_stride, w, w_panel, scales, minimums, scales_panel, groups, quads, out,
    out_stride, more, coming, step)``, to be called from compiled loops.

    out [rows, panels * 16], float32, gets the product of some rows and panels. Strides and ``_panel``, from one panel
    to the next, are bytes; `quads` are the tiles of a panel in a group; `factors` are a row's `FACTORS` of each group.
    Grouped variants heed `more`: with `ADDS`, groups are added to what is there; with `UNFINISHED`, others will be.
    With each tile of a panel the cache line at `coming` is fetched, which lies `step` bytes further each time.
    """

    @intrinsic
    def tile(typingctx, x, xs, f, fs, w, w_panel, scales, least, s_panel, groups, quads, out, outs, more, coming, step):
        def generate(context, builder, signature, args):
            emit_product(Emitter(builder), variant, rows, panels, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 16), generate

    return tile


def emit_product(emit: Emitter, variant: TileVariant, rows: int, panels: int, *arguments: ir.Value) -> None:
    """Append the instructions of `product`."""
    x, x_stride, factors, factors_stride, w, w_panel, scales, minimums, scales_panel, *of_sizes = arguments
    groups, quads, out, out_stride, more, coming, step = of_sizes
    builder, dots = emit.builder, variant.dots
    x_rows = [emit.at(x, emit.times(x_stride, row)) for row in range(rows)]
    factor_rows = [emit.at(factors, emit.times(factors_stride, row)) for row in range(rows)]
    w_panels = [emit.at(w, emit.times(w_panel, panel)) for panel in range(panels)]
    halves = 2 if variant.packed else 1

    def add_tile(sums: list[list[ir.Value]], quad: ir.Value, half_of_group: ir.Value) -> list[list[ir.Value]]:
        """Add the products of the tiles number `quad`; a packed tile's upper codes meet numbers further on."""
        # The panels that follow are fetched, a line a tile: the processor's own prefetching ends at a page of 4 KiB.
        offset = emit.times(quad, TILE_BYTES)
        emit_prefetch(builder, emit.at(coming, builder.mul(quad, step)))
        loaded = [emit.load(emit.at(panel, offset), vector(_BYTE, TILE_BYTES)) for panel in w_panels]
        out = list(sums)
        # A byte's high nibbles hold the group's second half, so they meet numbers that lie `quads` tiles further on.
        for half in range(halves):
            tiles = [dots.tile(emit, _codes(emit, codes, variant, half)) for codes in loaded]
            number = emit.at(half_of_group, quad) if half == 0 else emit.at(half_of_group, quad, quads)
            for row, x_row in enumerate(x_rows):
                four = dots.four(emit, emit.at(x_row, emit.times(number, dots.inputs * dots.number_bytes)))
                for panel, tile in enumerate(tiles):
                    place = row * panels + panel
                    out[place] = dots.add(emit, out[place], tile, four)
        return out

    def scaled(sums: list[list[ir.Value]], totals: list[ir.Value] | None, group: ir.Value) -> list[ir.Value]:
        """Return a group's sums as floats, added to those of the groups before."""
        at = emit.times(group, 16 * variant.scale_bytes)
        of_panels = [emit.at(at, emit.times(scales_panel, panel)) for panel in range(panels)]
        theirs = [emit.at(scales, panel) for panel in of_panels], [emit.at(minimums, panel) for panel in of_panels]
        whole = [dots.totals(emit, one) for one in sums]
        return scaled_group(emit, variant, whole, totals, factor_rows, group, *theirs, made_up=dots.whole)

    def all_quads(group: ir.Value, first: ir.Value, before: ir.Value) -> list[list[ir.Value]]:
        """Return the sums over a group, whose tiles begin at number `first`; where they can, they begin with what makes
        up for the codes' offset."""

        def by_place(flat: list[ir.Value]) -> list[list[ir.Value]]:
            return [flat[at : at + dots.pieces] for at in range(0, len(flat), dots.pieces)]

        def one_quad(quad: ir.Value, flat: list[ir.Value]) -> list[ir.Value]:
            sums = add_tile(by_place(flat), emit.at(first, quad), before)
            return [piece for place in sums for piece in place]

        # vpdpbusd multiplies unsigned by signed bytes, so codes are held 128 too large. sum(x * (code + 128)) is
        # corrected by -128 * sum(x), an integer that is added up front, where it costs no instruction in the loop.
        start = []
        for factor_row in factor_rows:
            begins = emit.constant(dots.piece, 0)
            if variant.makes_up and dots.whole:
                begins = emit.spread(_of_row(emit, factor_row, group, FLOAT, _INT), dots.piece.count)
            start += [begins] * (dots.pieces * panels)
        return by_place(repeated(emit, quads, start, one_quad))

    lines = [emit.at(out, emit.times(out_stride, row)) for row in range(rows)]
    places = [emit.at(line, panel * 16 * FLOAT) for line in lines for panel in range(panels)]
    if variant.grouped:
        adds, zeros = _has(builder, more, ADDS), emit.constant(FLOATS, 0.0)
        start = [builder.select(adds, emit.load(place, FLOATS), zeros) for place in places]

        def one_group(group: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            first = builder.mul(group, quads)
            sums = all_quads(group, first, emit.times(first, halves - 1))
            return scaled(sums, totals, group)

        results = repeated(emit, groups, start, one_group)
    else:
        none = ir.Constant(_WORD, 0)
        results = scaled(all_quads(none, none, none), None, none)
    if variant.shared:
        of_panels = [
            scales_at(emit, emit.at(scales, emit.times(scales_panel, panel)), variant) for panel in range(panels)
        ]
        whole = [builder.fmul(value, of_panels[place % panels]) for place, value in enumerate(results)]
        goes_on = _has(builder, more, UNFINISHED)
        results = [builder.select(goes_on, part, value) for part, value in zip(results, whole, strict=True)]
    for result, place in zip(results, places, strict=True):
        emit.store(result, place)


def _has(builder: ir.IRBuilder, flags: ir.Value, flag: int) -> ir.Value:
    return builder.icmp_signed("!=", builder.and_(flags, ir.Constant(_WORD, flag)), ir.Constant(_WORD, 0))


def _codes(emit: Emitter, loaded: ir.Value, variant: TileVariant, half: int) -> ir.Value:
    """Return the codes of 64 bytes, or of one half of them."""
    builder, bytes_ = emit.builder, loaded.type
    if not variant.packed:
        return builder.xor(loaded, emit.constant(bytes_, 128)) if variant.dots.signed else loaded
    if half == 0:
        return builder.and_(loaded, emit.constant(bytes_, 15))
    return builder.lshr(loaded, emit.constant(bytes_, 4))


def scaled_group(
    emit: Emitter,
    variant: TileVariant,
    sums: list[ir.Value],
    totals: list[ir.Value] | None,
    factor_rows: list[ir.Value],
    group: ir.Value,
    scales: list[ir.Value],
    minimums: list[ir.Value],
    *,
    made_up: bool,
) -> list[ir.Value]:
    """Return a group's sums as floats, times both scales, added to those of the groups before.

    Args:
        sums: integers, of 16 outputs, a row's of all panels one after another.
        totals: the floats of the groups before; None: there are none.
        factor_rows: addresses of the rows' factors.
        scales, minimums: addresses of the group's, of each panel.
        made_up: whether the sums began with what makes up for the codes' offset.
    """
    builder, panels = emit.builder, len(scales)
    factors_of = [] if variant.shared else [scales_at(emit, at, variant) for at in scales]
    least = [scales_at(emit, at, variant) for at in minimums] if variant.minimums else []
    found = []
    for row, factor_row in enumerate(factor_rows):
        mine = emit.spread(_of_row(emit, factor_row, group, 0, _FLOAT), 16)
        makes_up = emit.spread(_of_row(emit, factor_row, group, FLOAT, _INT), 16)
        moment = emit.spread(_of_row(emit, factor_row, group, 2 * FLOAT, _FLOAT), 16)
        for panel in range(panels):
            place = row * panels + panel
            whole = builder.add(sums[place], makes_up) if variant.makes_up and not made_up else sums[place]
            value = builder.sitofp(whole, FLOATS)
            if not variant.shared:
                value = builder.fmul(value, factors_of[panel])
            value = builder.fmul(value, mine) if totals is None else emit.fused(value, mine, totals[place])
            if variant.minimums:
                value = emit.fused(least[panel], moment, value)
            found.append(value)
    return found


def _of_row(emit: Emitter, factor_row: ir.Value, group: ir.Value, place: int, kind: ir.Type) -> ir.Value:
    """Return one of a row's `FACTORS` of a group."""
    return emit.load(emit.at(factor_row, emit.times(group, FACTORS), place), kind)


def scales_at(emit: Emitter, address: ir.Value, variant: TileVariant) -> ir.Value:
    """Return 16 scales or minimums as floats."""
    if not variant.half:
        return emit.load(address, FLOATS)
    return emit.builder.fpext(emit.load(address, vector(ir.HalfType(), 16)), FLOATS)


def repeated(emit: Emitter, times: ir.Value, start: list[ir.Value], turn: Any) -> list[ir.Value]:
    """Repeat ``turn(counter, values) -> values`` at least once, from `start`."""
    builder, before = emit.builder, emit.builder.block
    loop, after = builder.append_basic_block("turn"), builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    counter = builder.phi(_WORD)
    values = [builder.phi(value.type) for value in start]
    changed = turn(counter, values)
    following, last = emit.at(counter, 1), builder.block
    counter.add_incoming(ir.Constant(_WORD, 0), before)
    counter.add_incoming(following, last)
    for phi, first, later in zip(values, start, changed, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, last)
    builder.cbranch(builder.icmp_signed("<", following, times), loop, after)
    builder.position_at_end(after)
    return changed
