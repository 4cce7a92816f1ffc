"""Takes the softmax of a span's scores on CPU, as LLVM instructions for the machine they run on.

Scores are logarithms to base 2: a weight is then a power of two, which takes no multiplication. A row's maximum and sum
are folded in a fixed order, so that its bits do not depend on the other rows.

Memory. Scores lie as [rows, SPAN] in the caller's scratch, which fits in the first-level cache; weights replace them.
Loops. All are unrolled into straight-line vector code: `ROWS` rows at a time, each SPAN / LANES vectors long. Maxima
and sums of `ROWS` rows are folded across lanes together, so that the folds work on whole vectors.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.cpu_features import FEATURES, LANES
from pallas_kernels.cpu_tiles import FLOAT, VECTOR, VectorCode
from pallas_kernels.ffi.loops import njit
from pallas_kernels.paged_attention.cpu_scratch import SPAN

ROWS = min(8, LANES)
"""Rows whose maxima and sums are folded together."""

SCALES = LANES == 16 and FEATURES.get("avx512f", False)
"""True if the processor has an instruction that multiplies vectors by powers of two."""

_INDEX = ir.IntType(32)
_ROW_BYTES = SPAN * FLOAT
_LEAST = -126.0
_MAGIC = 1.5 * 2.0**23
"""Adding and subtracting it rounds to the nearest integer, which the low bits hold after the addition."""
_POWER = (1.0, 0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
"""Coefficients of 2 to the x, from -1/2 to 1/2, to 1e-7 of it: least squares in float64, weighted until all errors are
alike; exactly 1 at 0."""


def _same(kind: ir.VectorType, number: float) -> ir.Constant:
    return ir.Constant(kind, [number] * kind.count)


def _scaled_power(code: VectorCode, x: ir.Value, is_normal: ir.Value) -> ir.Value:
    """Return what `power_of_two` does, to the last bit, by AVX-512's instructions for whole parts and exponents."""
    builder, kind, mask = code.builder, x.type, ir.IntType(LANES)
    whole = builder.call(code.function(f"llvm.rint.v{LANES}f32", kind, [kind]), [x])
    power = _polynomial(code, builder.fsub(x, whole))
    scale = code.function("llvm.x86.avx512.mask.scalef.ps.512", kind, [kind, kind, kind, mask, _INDEX])
    as_set = ir.Constant(_INDEX, 4)  # use the current rounding mode; scaling by powers of two rounds nothing here
    return builder.call(scale, [power, whole, _same(kind, 0.0), builder.bitcast(is_normal, mask), as_set])


def _polynomial(code: VectorCode, x: ir.Value) -> ir.Value:
    """Return 2 to the x, from -1/2 to 1/2."""
    power = _same(x.type, _POWER[-1])
    for coefficient in _POWER[-2::-1]:
        power = code.fma(power, x, _same(x.type, coefficient))
    return power


def power_of_two(code: VectorCode, x: ir.Value) -> ir.Value:
    """Return 2 to the x <= 0 of a vector; 0 where float32 has no normal number."""
    builder, kind = code.builder, x.type
    bits = ir.VectorType(_INDEX, kind.count)
    is_normal = builder.fcmp_ordered(">=", x, _same(kind, _LEAST))
    if SCALES and kind == VECTOR:
        return _scaled_power(code, x, is_normal)
    x = builder.select(is_normal, x, _same(kind, _LEAST))
    # 2**x = 2**whole * 2**fraction: a polynomial for the fraction, and the whole part is added to its exponent bits.
    shifted = builder.fadd(x, _same(kind, _MAGIC))
    x = builder.fsub(x, builder.fsub(shifted, _same(kind, _MAGIC)))
    power = _polynomial(code, x)
    exponent = builder.shl(builder.bitcast(shifted, bits), ir.Constant(bits, [23] * kind.count))
    power = builder.bitcast(builder.add(builder.bitcast(power, bits), exponent), kind)
    return builder.select(is_normal, power, _same(kind, 0.0))


def _largest(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _exponentials(rows: int) -> Any:
    """Return ``f(scores, top, total, shrink)`` of so many rows, by address, to be called from compiled loops; see
    `exponentials`."""

    @intrinsic
    def take(typingctx, scores, top, total, shrink):
        def generate(context, builder, signature, args):
            scores, top, total, shrink = args
            code = VectorCode(builder)
            each = ir.VectorType(ir.FloatType(), rows)
            places = [
                [code.at(scores, row * _ROW_BYTES + at) for at in range(0, _ROW_BYTES, LANES * FLOAT)]
                for row in range(rows)
            ]
            # Fold each row's vectors into one, pairwise; `folded` then leaves one number a row, in one vector.
            largest = []
            for row in places:
                vectors = [code.load(place) for place in row]
                while len(vectors) > 1:
                    vectors = [_largest(builder, a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
                largest += vectors
            before = code.load(top, each)
            now = _largest(builder, code.folded(largest, lambda a, b: _largest(builder, a, b)), before)
            code.store(now, top)
            # Sums and values so far are relative to the old maximum: they shrink by 2**(old - new).
            factors = power_of_two(code, builder.fsub(before, now))
            code.store(factors, shrink)
            sums = []
            for number, row in enumerate(places):
                mine = ir.Constant(ir.VectorType(_INDEX, LANES), [number] * LANES)
                its_top = builder.shuffle_vector(now, ir.Constant(each, ir.Undefined), mine)
                weights = [power_of_two(code, builder.fsub(code.load(place), its_top)) for place in row]
                for place, weight in zip(row, weights, strict=True):
                    code.store(weight, place)
                while len(weights) > 1:
                    weights = [builder.fadd(a, b) for a, b in zip(weights[::2], weights[1::2], strict=True)]
                sums += weights
            code.store(code.fma(code.load(total, each), factors, code.totals(sums)), total)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), generate

    return take


_several, _pair, _single = _exponentials(ROWS), _exponentials(2), _exponentials(1)


@njit
def exponentials(scores, top, total, shrink, number):
    """Replace scores [number, SPAN] by weights: the online softmax of FlashAttention-2 (arXiv 2307.08691, algorithm 1).

    All arguments but `number` are addresses. Updates `top` and `total`, the maximum and sum so far, ``[number]``, and
    writes to `shrink`, ``[number]``, the factors by which the caller must multiply the weighted values so far.
    """
    row = 0
    while number - row >= ROWS:
        at = row * FLOAT
        _several(scores + row * _ROW_BYTES, top + at, total + at, shrink + at)
        row += ROWS
    while number - row >= 2:
        at = row * FLOAT
        _pair(scores + row * _ROW_BYTES, top + at, total + at, shrink + at)
        row += 2
    if row < number:
        at = row * FLOAT
        _single(scores + row * _ROW_BYTES, top + at, total + at, shrink + at)
