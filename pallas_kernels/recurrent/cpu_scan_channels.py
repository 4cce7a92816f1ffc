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


def _exp(code: VectorCode, x: ir.Value) -> ir.Value:
    """Return e to the x <= 0: `pallas_kernels.paged_attention.cpu_math.exp` of every lane."""
    builder = code.builder
    least = _all(-87.0)
    normal = builder.fcmp_ordered(">=", x, least)
    x = builder.select(normal, x, least)
    floor = code.function(f"llvm.floor.v{LANES}f32", VECTOR, [VECTOR])
    n = builder.call(floor, [code.fma(x, _all(1.44269504), _all(0.5))])
    r = code.fma(n, _all(2.12194440e-4), code.fma(n, _all(-0.693359375), x))
    p = code.fma(_all(1.9875691500e-4), r, _all(1.3981999507e-3))
    for coefficient in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = code.fma(p, r, _all(coefficient))
    p = builder.fadd(code.fma(p, builder.fmul(r, r), r), _all(1.0))
    power = builder.shl(builder.add(builder.fptosi(n, _INTS), _all_ints(127)), _all_ints(23))
    return builder.select(normal, builder.fmul(p, builder.bitcast(power, VECTOR)), _all(0.0))


@intrinsic
def scan_channels(typingctx, state, state_stride, rates, rates_stride, size, x, dt, d, b, c, out):
    """Update `LANES` channels of a state [size, ...] and put their outputs.

    Arguments are addresses and strides in bytes, but for `size`: the state and its rates, rows apart; x, dt, d and out,
    a vector each; b and c, `size` numbers.
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
            value = code.fma(_exp(code, builder.fmul(steps, rate)), code.load(place), builder.fmul(b_n, inputs))
            code.store(value, place)
            return [code.fma(c_n, value, sums[0])]

        (y,) = code.sums(size, 1, turn)
        code.store(code.fma(code.load(d), given, y), out)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 11), generate
