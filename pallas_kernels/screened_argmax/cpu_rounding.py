"""Rounds rows of x to digits of 8 bits, as what multiplies the codes of a screen.

Hidden states have a few numbers that are ten and more times as large as the others. With one scale for a row they would
leave the others few digits, so the scale follows the row's norm, and a number that is too large for one digit has
several, of the same scale, whose tiles are multiplied again: a sum of integers does not mind. `GROUP` rows go through
the tiles together, in turns that say which inputs come next.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from pallas_kernels.ffi.primitives import pointer
from pallas_kernels.paged_attention.cpu_math import f32
from pallas_kernels.screened_argmax.screen import INPUTS, LARGEST, OFFSET, SMALLEST

GROUP = 8
"""Rows that go through the tiles together."""
DIGIT = 127
"""The largest digit."""
MOST_DIGITS = 8
"""Digits of a number."""
RANGE = 3.0
"""Largest number of a first digit, in units of the row's root mean square. With less, more tiles are multiplied again;
with more, more words reach the best one's bound. 3 to 4 took the least time with SmolLM2-135M."""
_LOOSE = {"contract", "reassoc", "nsz", "arcp"}
_FLOAT = 4


def most_turns(inputs: int) -> int:
    """Return how many turns a group can have."""
    return MOST_DIGITS * (inputs // INPUTS)


@njit(fastmath=_LOOSE)
def _norms(x):
    """Return a row's largest size and its 2-norm."""
    top, squares = f32(0.0), f32(0.0)
    for lane in range(x.size):
        top = max(top, abs(x[lane]))
        squares += x[lane] * x[lane]
    return top, np.sqrt(squares)


@njit(fastmath=_LOOSE)
def _nearest(x, inverse, scale, near):
    """Round ``x * inverse``; returns the 2-norm of the rounding error, and the sum of the integers."""
    lost, total = f32(0.0), np.int32(0)
    for lane in range(x.size):
        number = np.rint(x[lane] * inverse)
        near[lane] = np.int16(number)
        rest = x[lane] - number * scale
        lost += rest * rest
        total += np.int32(number)
    return np.sqrt(lost), total


@njit(error_model="numpy")
def round_row(x, near, facts, facts_as_int):
    """Round a row to integers and write its facts; returns whether it can be screened."""
    top, norm = _norms(x)
    finite = True
    for lane in range(x.size):
        finite = finite and abs(x[lane]) < f32(LARGEST)
    if not (finite and top > f32(SMALLEST)):
        skip_row(near, facts, facts_as_int)
        return False
    by_norm = f32(RANGE / DIGIT) * norm / np.sqrt(f32(x.size))
    scale = max(by_norm, top * f32(1.0001 / (DIGIT * MOST_DIGITS)))
    lost, total = _nearest(x, f32(1.0) / scale, scale, near)
    facts_as_int[0] = -OFFSET * total
    # Sums of squares in float32 may be too small by a share of about their number of terms.
    facts[1] = norm * f32(1.0001) / scale
    facts[2] = (lost + norm * f32(1e-6)) * f32(1.0001) / scale
    facts[3] = f32(-np.inf)
    return True


@njit
def skip_row(near, facts, facts_as_int):
    """Write zeros, and facts with which nothing is found."""
    for lane in range(near.size):
        near[lane] = 0
    facts_as_int[0] = 0
    facts[1] = f32(0.0)
    facts[2] = f32(0.0)
    facts[3] = f32(np.inf)


@njit
def write_turns(near, inputs, digits, order):
    """Cut the integers of a group's rows into digits.

    Args:
        near: int16 [GROUP, inputs]; zeros afterwards.
        digits: address of int8 [turns, GROUP, INPUTS].
        order: address of int32: the number of turns, and which tile each is of.
    """
    steps, count = carray(pointer(order), (1 + most_turns_of(inputs),), np.int32), 0
    for quad in range(inputs // INPUTS):
        left = True
        while left:
            left = False
            out = carray(pointer(digits + count * GROUP * INPUTS), (GROUP, INPUTS), np.int8)
            for row in range(GROUP):
                for place in range(INPUTS):
                    number = near[row, quad * INPUTS + place]
                    digit = max(-DIGIT, min(DIGIT, number))
                    out[row, place] = np.int8(digit)
                    near[row, quad * INPUTS + place] = np.int16(number - digit)
                    left = left or number != digit
            steps[1 + count] = quad
            count += 1
    steps[0] = count


@njit
def most_turns_of(inputs):
    """Do as `most_turns`, in loops."""
    return MOST_DIGITS * (inputs // INPUTS)
