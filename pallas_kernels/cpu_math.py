"""Holds float32 arithmetic that the loops on CPU share, written so that LLVM vectorises loops over it, and copies."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.ffi.loops import njit

FAST = {"contract", "reassoc", "nsz", "arcp", "nnan"}
"""Fused multiply-adds, reductions in vector order, maxima that need not look for NaN."""

f32 = np.float32
LOG2_E, LN_2 = f32(1.44269504), f32(0.69314718)


@intrinsic
def float_of_bits(typingctx, bits):
    """Return the float32 that has these bits."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def _fma(typingctx, a, b, c):
    """Return ``a * b + c``, rounded once at any level of optimisation."""

    def generate(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@njit
def exp(x):
    """Return e to the x <= 0, to a few units in the last place, by Cephes' polynomial; 0 where float32 has no normal
    number.

    One number has one result, alone or in a vector.
    """
    least = f32(-87.0)
    is_normal = x >= least
    x = max(x, least)
    n = np.floor(_fma(x, f32(1.44269504), f32(0.5)))
    r = _fma(n, f32(2.12194440e-4), _fma(n, f32(-0.693359375), x))
    p = _fma(f32(1.9875691500e-4), r, f32(1.3981999507e-3))
    p = _fma(p, r, f32(8.3334519073e-3))
    p = _fma(p, r, f32(4.1665795894e-2))
    p = _fma(p, r, f32(1.6666665459e-1))
    p = _fma(p, r, f32(5.0000001201e-1))
    p = _fma(p, r * r, r) + f32(1.0)
    power = p * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    return power if is_normal else f32(0.0)


@njit(fastmath=FAST)
def tanh(x):
    """Return the hyperbolic tangent of x."""
    e = exp(f32(-2.0) * abs(x))
    return np.copysign((f32(1.0) - e) / (f32(1.0) + e), x)


@njit
def fill(array, number):
    """Set all numbers of an array. An assignment to ``array[:]`` does the same, but Numba compiles a second for it."""
    for n in range(array.size):
        array[n] = number


@njit
def copy(source, to):
    """Copy an array to the beginning of another one; see `fill`."""
    for n in range(source.size):
        to[n] = source[n]
