"""Rounds a row's numbers to 8 bits, as what multiplies the codes of a matrix."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.cpu_dots import FLOATS, INTS, Emitter, vector
from pallas_kernels.tiled_matmul.cpu_tiles import FLOAT, TileVariant, repeated

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
    bytes_of_one = variant.dots.number_bytes
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
