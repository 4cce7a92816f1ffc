"""Takes a vector's channels through a token of the selective scan, as LLVM instructions: most of it is exponentials,
which loops in Numba do not fill vectors with."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.cpu_tiles import FLOAT, LANES, VECTOR, VectorCode

_INTS, _ONE = ir.VectorType(ir.IntType(32), LANES), ir.FloatType()


def _all(value: float) -> ir.Constant:
    return ir.Constant(VECTOR, [value] * LANES)


def _all_ints(value: int) -> ir.Constant:
    return ir.Constant(_INTS, [value] * LANES)


def _exp2(code: VectorCode, x: ir.Value) -> ir.Value:
    """Return 2 to the x <= 0 of every lane, as Cephes' exp2f does (error 2e-7); least is 2**-126."""
    builder, least = code.builder, _all(-126.0)
    x = builder.select(builder.fcmp_ordered(">", x, least), x, least)
    nearest = code.function(f"llvm.nearbyint.v{LANES}f32", VECTOR, [VECTOR])
    n = builder.call(nearest, [x])
    r = builder.fsub(x, n)
    p = code.fma(_all(1.535336188e-4), r, _all(1.339887440e-3))
    for coefficient in (9.618437358e-3, 5.550332471e-2, 2.402264791e-1, 6.931472029e-1, 1.0):
        p = code.fma(p, r, _all(coefficient))
    power = builder.shl(builder.fptosi(n, _INTS), _all_ints(23))
    return builder.bitcast(builder.add(builder.bitcast(p, _INTS), power), VECTOR)


@intrinsic
def scan_channels(typingctx, state, state_stride, rates, rates_stride, size, x, dt, d, b, c, out):
    """Update `LANES` channels of a state [size, ...] and put their outputs.

    Arguments are addresses and strides in bytes, but for `size`: the state and its rates, rows apart, to the base 2; x,
    dt, d and out, a vector each; b and c, `size` numbers.
    """

    def generate(context, builder, signature, args):
        state, state_stride, rates, rates_stride, size, x, dt, d, b, c, out = args
        code, word = VectorCode(builder), ir.IntType(64)
        given, steps = code.load(x), code.load(dt)
        inputs = builder.fmul(given, steps)

        def turn(n, sums):
            place = code.at(state, builder.mul(n, state_stride))
            rate = code.load(code.at(rates, builder.mul(n, rates_stride)))
            offset = builder.mul(n, ir.Constant(word, FLOAT))
            b_n, c_n = (code.spread(code.load(code.at(of, offset), _ONE)) for of in (b, c))
            value = code.fma(_exp2(code, builder.fmul(steps, rate)), code.load(place), builder.fmul(b_n, inputs))
            code.store(value, place)
            return [code.fma(c_n, value, sums[0])]

        (y,) = code.sums(size, 1, turn)
        code.store(code.fma(code.load(d), given, y), out)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 11), generate
