"""Multiplies the digits of some rows with some panels of a screen, every sum in a register, and bounds the products."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.cpu_dots import FLOATS, KINDS, Emitter, Kind, vector
from pallas_kernels.ffi.primitives import emit_prefetch
from pallas_kernels.screened_argmax.cpu_rounding import GROUP
from pallas_kernels.screened_argmax.screen import INPUTS, LENGTH, LOST, SCALE
from pallas_kernels.tile_order import OUTPUTS
from pallas_kernels.tiled_matmul.cpu_tiles import FLOAT, TILE_BYTES, repeated

_BYTE, _SHORT, _INT, _WORD, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
WORDS_BYTES = 3 * OUTPUTS * FLOAT
"""Bytes of `Screen.words` of a panel."""
FACTS_BYTES = 16
"""Bytes of a row's facts, see `cpu.FACTS`."""


def bounds(kind: Kind, rows: int, panels: int) -> Any:
    """Return ``f(digits, order, facts, codes, panel_bytes, words, upper, coming) -> reached``, to be called from
    compiled loops.

    upper [rows, panels * 16], float32, gets a bound that no product of these rows and panels exceeds, in units of the
    rows' scales; `reached` is not 0 where one is no less than its row's best lower bound, or is not a number. Arguments
    are addresses: `digits` of the first of these rows in the group's first turn, `order` of the number of turns and
    their tiles, `coming` of panels to prefetch.
    """
    dots = KINDS[kind]

    @intrinsic
    def tile(typingctx, digits, order, facts, codes, panel_bytes, words, upper, coming):
        def generate(context, builder, signature, args):
            digits, order, facts, codes, panel_bytes, words, upper, coming = args
            emit = Emitter(builder)
            of_panels = [emit.at(codes, emit.times(panel_bytes, panel)) for panel in range(panels)]
            following = [emit.at(coming, emit.times(panel_bytes, panel)) for panel in range(panels)]

            def turn(number: ir.Value, flat: list[ir.Value]) -> list[ir.Value]:
                own = emit.load(emit.at(order, emit.times(emit.at(number, 1), FLOAT)), _INT)
                offset = emit.times(builder.zext(own, _WORD), TILE_BYTES)
                for panel in following:
                    emit_prefetch(builder, emit.at(panel, offset))
                loaded = [emit.load(emit.at(panel, offset), vector(_BYTE, TILE_BYTES)) for panel in of_panels]
                tiles = [dots.tile(emit, codes) for codes in loaded]
                mine, out = emit.at(digits, emit.times(number, GROUP * INPUTS)), list(flat)
                for row in range(rows):
                    four = dots.four(emit, emit.at(mine, row * INPUTS))
                    for panel, codes in enumerate(tiles):
                        at = (row * panels + panel) * dots.pieces
                        out[at : at + dots.pieces] = dots.add(emit, out[at : at + dots.pieces], codes, four)
                return out

            zeros = [emit.constant(dots.piece, 0)] * (rows * panels * dots.pieces)
            sums = repeated(emit, builder.zext(emit.load(order, _INT), _WORD), zeros, turn)

            def of_words(panel: int, which: int) -> ir.Value:
                return emit.load(emit.at(words, panel * WORDS_BYTES + which * OUTPUTS * FLOAT), FLOATS)

            reached = ir.Constant(_SHORT, 0)
            for row in range(rows):
                offset, norm, lost, best = (
                    emit.spread(emit.load(emit.at(facts, row * FACTS_BYTES + at * FLOAT), number), OUTPUTS)
                    for at, number in enumerate((_INT, _FLOAT, _FLOAT, _FLOAT))
                )
                for panel in range(panels):
                    at = (row * panels + panel) * dots.pieces
                    whole = builder.add(dots.totals(emit, sums[at : at + dots.pieces]), offset)
                    near = builder.fmul(builder.sitofp(whole, FLOATS), of_words(panel, SCALE))
                    radius = builder.fadd(
                        builder.fmul(of_words(panel, LOST), norm), builder.fmul(of_words(panel, LENGTH), lost)
                    )
                    above = builder.fadd(near, radius)
                    emit.store(above, emit.at(upper, (row * panels + panel) * OUTPUTS * FLOAT))
                    mask = builder.bitcast(builder.fcmp_unordered(">=", above, best), _SHORT)
                    reached = builder.or_(reached, mask)
            return builder.zext(reached, _WORD)

        return types.intp(*[types.intp] * 8), generate

    return tile
