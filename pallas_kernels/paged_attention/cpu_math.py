"""Arithmetic that the loops on CPU share, in float32, written so that LLVM vectorises loops over it."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

FAST = {"contract", "reassoc", "nsz", "arcp", "nnan"}
"""Fused multiply-adds, reductions in vector order, maxima that need not look for NaN."""

f32 = np.float32
NEVER = f32(-1e30)
"""Below every score; the difference of two of them is a number."""


@intrinsic
def _float_of_bits(typingctx, bits):
    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@njit(fastmath=FAST)
def exp(x):
    """e to the x <= 0, to a few units in the last place: Cephes' polynomial."""
    x = max(x, f32(-87.0))
    n = np.floor(x * f32(1.44269504) + f32(0.5))
    r = x - n * f32(0.693359375) + n * f32(2.12194440e-4)
    p = f32(1.9875691500e-4)
    p = p * r + f32(1.3981999507e-3)
    p = p * r + f32(8.3334519073e-3)
    p = p * r + f32(4.1665795894e-2)
    p = p * r + f32(1.6666665459e-1)
    p = p * r + f32(5.0000001201e-1)
    return (p * r * r + r + f32(1.0)) * _float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(fastmath=FAST)
def tanh(x):
    """Hyperbolic tangent."""
    e = exp(f32(-2.0) * abs(x))
    return np.copysign((f32(1.0) - e) / (f32(1.0) + e), x)


@njit(fastmath=FAST)
def cap_scores(scores, begin, end, cap):
    """``cap * tanh(score / cap)`` in the place of the scores of some keys."""
    for g in range(scores.shape[0]):
        for key in range(begin, end):
            scores[g, key] = cap * tanh(scores[g, key] / cap)


@njit
def hide(scores, begin, end):
    """Keys that are not seen; none where the range is empty."""
    for g in range(scores.shape[0]):
        for key in range(max(begin, 0), end):
            scores[g, key] = NEVER


@njit(fastmath=FAST)
def exponentials(scores, top, total, values):
    """Put weights in the place of scores [group, keys]: the online softmax of FlashAttention-2 (arXiv 2307.08691,
    algorithm 1), whose maximum and sum so far, ``[group]``, and weighted values are brought up to date."""
    for g in range(scores.shape[0]):
        mine = scores[g]
        new_top = top[g]
        for key in range(mine.size):
            new_top = max(new_top, mine[key])
        if new_top <= NEVER:
            continue
        shrink = exp(top[g] - new_top)
        top[g] = new_top
        sum_ = f32(0.0)
        for key in range(mine.size):
            weight = exp(mine[key] - new_top)
            mine[key] = weight
            sum_ += weight
        total[g] = total[g] * shrink + sum_
        for lane in range(values.shape[1]):
            values[g, lane] *= shrink
