"""Holds the loops of the selective scan on CPUs, see `pallas_kernels.recurrent.cpu_walk`.

A channel has a separate decay for each of its states, so a unit is no product of matrices. Instead, the loops take one
vector of channels at a time through all tokens of the unit, as LLVM instructions: its states, `STATES` vectors, stay in
registers from token to token, and the exponentials, which are most of the work, fill whole vectors. Inputs are
prefetched some tokens ahead. Channels after the last whole vector are taken one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels import ffi
from pallas_kernels.cpu_math import copy, exp, f32
from pallas_kernels.cpu_tiles import FLOAT, LANES, MANY_REGISTERS, VECTOR, VectorCode
from pallas_kernels.ffi.loops import njit
from pallas_kernels.ffi.primitives import emit_prefetch
from pallas_kernels.recurrent.cpu_products import row_at, stride_of
from pallas_kernels.recurrent.cpu_walk import register, six_operands

STATES = 16 if MANY_REGISTERS else 4
"""States of a channel that registers hold at once, next to the temporaries of a turn."""
_AHEAD = 8
"""Inputs are prefetched so many tokens ahead: they lie so far apart that no processor prefetches them itself."""

_WORD, _ONE = ir.IntType(64), ir.FloatType()
_INTS = ir.VectorType(ir.IntType(32), LANES)
_EXP2 = (1.490251773e-4, 1.338958213e-3, 9.620017957e-3, 5.550365183e-2, 2.402263686e-1, 6.931471833e-1, 1.0)
"""Coefficients of 2 to the r for r from -1/2 to 1/2, highest power first. Among the polynomials that are exactly 1 at
0, so that a state that hardly decays does not grow, this one has the least maximum relative error, 2e-9."""
_SHORT_EXP2 = (2.402264974e-1, 6.931573298e-1, 1.0)
"""The same for r from -1/64 to 1/64; the error is 5e-8."""


def _all(value: float) -> ir.Constant:
    return ir.Constant(VECTOR, [value] * LANES)


def _all_ints(value: int) -> ir.Constant:
    return ir.Constant(_INTS, [value] * LANES)


def _polynomial(code: VectorCode, coefficients: tuple[float, ...], r: ir.Value) -> ir.Value:
    p = _all(coefficients[0])
    for coefficient in coefficients[1:]:
        p = code.fma(p, r, _all(coefficient))
    return p


def _exp2(code: VectorCode, x: ir.Value) -> ir.Value:
    """Return 2 to the finite x <= 0 of every lane, to two units in the last place."""
    return _exp2_of_avx512(code, x) if LANES == 16 else _exp2_of_any(code, x)


def _exp2_of_any(code: VectorCode, x: ir.Value) -> ir.Value:
    """Compute `_exp2` by a polynomial and exponent bits; the least result is 2**-126."""
    builder, least = code.builder, _all(-126.0)
    x = builder.select(builder.fcmp_ordered(">", x, least), x, least)
    whole = builder.call(code.function(f"llvm.nearbyint.v{LANES}f32", VECTOR, [VECTOR]), [x])
    power = builder.shl(builder.fptosi(whole, _INTS), _all_ints(23))
    p = _polynomial(code, _EXP2, builder.fsub(x, whole))
    return builder.bitcast(builder.add(builder.bitcast(p, _INTS), power), VECTOR)


def _exp2_of_avx512(code: VectorCode, x: ir.Value) -> ir.Value:
    """Compute `_exp2` with few multiplications, for which these processors have half as many units as for the rest.

    x is split into a number of 32nds and a rest. The power of the fractional 32nds is looked up in two registers.
    """
    builder, parts, number, mask = code.builder, 32, ir.IntType(32), ir.IntType(16)
    pick = code.function("llvm.x86.avx512.vpermi2var.ps.512", VECTOR, [VECTOR, _INTS, VECTOR])
    scale = code.function("llvm.x86.avx512.mask.scalef.ps.512", VECTOR, [VECTOR, VECTOR, VECTOR, mask, number])
    powers = [float(np.float32(2 ** (part / parts))) for part in range(parts)]
    low, high = (ir.Constant(VECTOR, half) for half in (powers[:16], powers[16:]))
    rounding = _all(1.5 * 2**23 / parts)  # after adding it, the last bits are the number of 32nds
    shifted = builder.fadd(x, rounding)
    nearest = builder.fsub(shifted, rounding)
    fraction = builder.call(pick, [low, builder.bitcast(shifted, _INTS), high])
    every, as_set = ir.Constant(mask, -1), ir.Constant(number, 4)
    power = builder.call(scale, [fraction, nearest, fraction, every, as_set])  # scalef uses floor(nearest)
    return builder.fmul(power, _polynomial(code, _SHORT_EXP2, builder.fsub(x, nearest)))


def scan_tokens(states: int) -> Any:
    """Return ``f(state, state_stride, rates, rates_stride, x, dt, d, b, c, b_stride, out, stride, tokens, more)``, to
    be called from compiled loops.

    It updates `states` rows of `LANES` channels by one token after another, and writes their outputs or, with `more`,
    adds them to those of other rows. Arguments are addresses and strides in bytes, except the number of tokens, at
    least 1: the state and its rates to the base 2, with strides between rows; x, dt and out, `stride` from token to
    token; d; b and c, `b_stride` from token to token.
    """

    @intrinsic
    def scan(typingctx, state, state_stride, rates, rates_stride, x, dt, d, b, c, b_stride, out, stride, tokens, more):
        def generate(context, builder, signature, args):
            state, state_stride, rates, rates_stride, x, dt, d, b, c, b_stride, out, stride, tokens, more = args
            code = VectorCode(builder)
            places, rate_rows = code.rows(state, state_stride, states), code.rows(rates, rates_stride, states)
            skip = code.load(d)
            others = builder.icmp_signed("!=", more, ir.Constant(_WORD, 0))

            def turn(token, values):
                at, b_at = builder.mul(token, stride), builder.mul(token, b_stride)
                for of in (x, dt):
                    emit_prefetch(builder, code.at(code.at(of, at), builder.mul(stride, ir.Constant(_WORD, _AHEAD))))
                given, steps = code.load(code.at(x, at)), code.load(code.at(dt, at))
                inputs, place = builder.fmul(given, steps), code.at(out, at)
                y = builder.select(others, code.load(place), builder.fmul(skip, given))
                after = []
                for n, value in enumerate(values):
                    b_n, c_n = (code.spread(code.load(code.at(code.at(of, b_at), n * FLOAT), _ONE)) for of in (b, c))
                    decay = _exp2(code, builder.fmul(steps, code.load(rate_rows[n])))
                    after.append(code.fma(decay, value, builder.fmul(b_n, inputs)))
                    y = code.fma(c_n, after[-1], y)
                code.store(y, place)
                return after

            for value, place in zip(
                code.turns(tokens, [code.load(place) for place in places], turn), places, strict=True
            ):
                code.store(value, place)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 14), generate

    return scan


_LN2 = f32(0.6931471805599453)


_many, _one = scan_tokens(STATES), scan_tokens(1)


@njit
def _token(state, at, token, operands, out, rows):
    """operands: x, dt [tokens, ch], b, c [tokens, n], a [n, ch] to the base 2, d [1, ch]."""
    a, width = operands[4], rows.shape[1]
    vectors = width // LANES
    for lane in range(0, vectors * LANES, LANES):
        _vector(state, lane, at, token, token + 1, operands, row_at(a, 0, at + lane), stride_of(a), out)
    _others(state, vectors * LANES, at, token, token + 1, operands, out, width)


@njit
def _piece(state, at, start, length, operands, out, scratch):
    """Take one vector of channels through all tokens, then the next vector.

    The vector's rates are copied together first: rows of a wide layer lie a power of two apart, and the first-level
    cache can hold only a few such lines.
    """
    a, rates, stop, width = operands[4], scratch.turned, start + length, state.shape[1]
    vectors = width // LANES
    for lane in range(0, vectors * LANES, LANES):
        for n in range(len(state)):
            copy(a[n, at + lane : at + lane + LANES], rates[n])
        _vector(state, lane, at, start, stop, operands, row_at(rates, 0, 0), stride_of(rates), out)
    _others(state, vectors * LANES, at, start, stop, operands, out, width)


@njit
def _vector(state, lane, at, start, stop, operands, rates, rates_stride, out):
    """Take `LANES` channels through the tokens from `start` to `stop`, as many states at a time as registers hold."""
    x, dt, b, c, _, d = operands
    given, steps, to = row_at(x, start, at + lane), row_at(dt, start, at + lane), row_at(out, start, at + lane)
    skip, stride, its_stride, below = row_at(d, 0, at + lane), stride_of(x), stride_of(b), stride_of(state)
    n, size = 0, len(state)
    while n < size:
        place, rate = row_at(state, n, lane), rates + n * rates_stride
        its_b, its_c, tokens = row_at(b, start, n), row_at(c, start, n), stop - start
        if size - n >= STATES:
            _many(place, below, rate, rates_stride, given, steps, skip, its_b, its_c, its_stride, to, stride, tokens, n)
            n += STATES
        else:
            _one(place, below, rate, rates_stride, given, steps, skip, its_b, its_c, its_stride, to, stride, tokens, n)
            n += 1


@njit
def _others(state, first, at, start, stop, operands, out, width):
    """Take the channels after the last whole vector through the tokens."""
    x, dt, b, c, a, d = operands
    for i in range(first, width):
        for token in range(start, stop):
            step, given = dt[token, at + i], x[token, at + i]
            y = d[0, at + i] * given
            for n in range(len(state)):
                state[n, i] = exp(step * a[n, at + i] * _LN2) * state[n, i] + b[token, n] * (step * given)
                y += c[token, n] * state[n, i]
            out[token, at + i] = y


@ffi.known_again
def targets() -> tuple[str, str]:
    """Return the names of the custom calls, see `pallas_kernels.recurrent.cpu_walk.register`."""
    return register("scan", six_operands, _token, _piece)
