"""Random quantised matrices of every form, and their values computed one by one."""

import numpy as np

from jpaged.loading.weight_formats.weight_format import WeightFormat
from pallas_kernels.quantised import (
    E2M1_FLOATS,
    E2M1_PAIRS,
    FLOAT8,
    FP4_PAIRS,
    FP4_VALUES,
    INT8,
    IQ4_PAIRS,
    IQ4_VALUES,
    NF4_PAIRS,
    NF4_VALUES,
    UINT4,
    UINT4_PAIRS,
)

RNG = np.random.default_rng(0)
FLOAT32, HALF = np.dtype(np.float32), np.dtype(np.float16)
FORMS = {
    "int8": WeightFormat(INT8, 0, FLOAT32),
    "int8 groups": WeightFormat(INT8, 16, HALF),
    "int8 minimums": WeightFormat(INT8, 16, HALF, minimums=True),
    "fp8": WeightFormat(FLOAT8, 0, FLOAT32),
    "int4": WeightFormat(UINT4_PAIRS, 32, HALF, minimums=True),
    "uint4": WeightFormat(UINT4, 16, FLOAT32, minimums=True),
    "mxfp4": WeightFormat(E2M1_PAIRS, 32, np.dtype(np.uint8)),
    "nvfp4": WeightFormat(E2M1_FLOATS, 16, FLOAT32),
    "nf4": WeightFormat(NF4_PAIRS, 64, FLOAT32),
    "fp4": WeightFormat(FP4_PAIRS, 64, FLOAT32),
    "iq4": WeightFormat(IQ4_PAIRS, 32, HALF),
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The published values of MXFP4's codes."""
VALUES = {E2M1_PAIRS: E2M1, E2M1_FLOATS: E2M1, NF4_PAIRS: NF4_VALUES, FP4_PAIRS: FP4_VALUES, IQ4_PAIRS: IQ4_VALUES}


def random_matrix(form, shape, axis=-2):
    """Random codes, so that no rounding is shared with the code that quantises."""

    parts = iter(("codes", "scales", "minimums"))

    def make(shape, dtype):
        if form.codec == E2M1_PAIRS:  # all codes; exponents around that of one
            low, high = {"codes": (0, 256), "scales": (120, 132)}[next(parts)]
            return RNG.integers(low, high, shape).astype(dtype)
        if dtype in (INT8.dtype, UINT4_PAIRS.dtype, UINT4.dtype):
            return RNG.integers(0, 16 if dtype == UINT4.dtype else 100, shape).astype(dtype)
        return RNG.standard_normal(shape, np.float32).astype(dtype)

    return form.parts(axis, shape, make)


def by_hand(matrix):
    """Value by value."""
    codes, scales = np.asarray(matrix.codes), np.asarray(matrix.scales, np.float32)
    if matrix.codec == E2M1_PAIRS:
        scales = np.float32(2) ** (scales - 127)
    axis = codes.ndim + matrix.axis
    size = matrix.shape[axis] // scales.shape[axis]
    out = np.empty(matrix.shape, np.float32)
    for at in np.ndindex(*matrix.shape):
        group = (*at[:axis], at[axis] // size, *at[axis + 1 :])
        if matrix.codec.paired:
            place = at[axis] % size
            byte = codes[(*at[:axis], at[axis] // size * (size // 2) + place % (size // 2), *at[axis + 1 :])]
            code = byte & 15 if place < size // 2 else byte >> 4
        else:
            code = codes[at]
        out[at] = np.float32(VALUES[matrix.codec][code] if matrix.codec in VALUES else code) * scales[group]
        if matrix.minimums is not None:
            out[at] += np.float32(matrix.minimums[group])
    return out
