"""Turns float matrices into codes with scales, by rounding to nearest, on the host."""

from __future__ import annotations

import math

import numpy as np

from jpaged.loading.weight_formats.stored_codes import grouped, pack
from jpaged.loading.weight_formats.weight_format import WeightFormat
from jpaged.model_api import HostArray
from pallas_kernels.quantised import FLOAT8, INT8, UINT4, UINT4_PAIRS, QuantisedMatrix

_CHUNK_BYTES = 32 << 20
"""Bytes of float32 held at a time, so that a large matrix is never float32 as a whole."""

_LARGEST = {INT8: 127.0, FLOAT8: 448.0, UINT4_PAIRS: 15.0, UINT4: 15.0}
"""Largest code: int8 and fp8 are symmetric; codes of four bits count from the group's minimum."""


def quantise(array: HostArray, axis: int, form: WeightFormat) -> QuantisedMatrix:
    """Quantise a float matrix ``[..., inputs, outputs]``, contracted along `axis` (negative), to codes in `form`.

    int8 and fp8: ``scale = max |w| / largest code`` of a group. 4 bits: ``scale = (max - min) / 15`` over a range
    that includes 0.
    """
    out = form.parts(axis, array.shape, np.empty)
    assert isinstance(out, QuantisedMatrix)
    along = -3 - axis  # the axis whose lines are quantised independently
    size = max(1, _CHUNK_BYTES // (4 * math.prod(array.shape) // array.shape[along]))
    for start in range(0, array.shape[along], size):
        lines = [slice(None)] * len(array.shape)
        lines[along] = slice(start, start + size)
        at = tuple(lines)
        _quantise_lines(np.asarray(array[at], np.float32), axis, form, _at(out, at))
    return out


def _at(matrix: QuantisedMatrix, at: tuple[slice, ...]) -> QuantisedMatrix:
    minimums = None if matrix.minimums is None else matrix.minimums[at]
    return QuantisedMatrix(matrix.codes[at], matrix.scales[at], minimums, matrix.axis, matrix.codec)


def _quantise_lines(lines: np.ndarray, axis: int, form: WeightFormat, out: QuantisedMatrix) -> None:
    at = lines.ndim + axis
    groups = grouped(lines, at, out.scales.shape[at])
    if form.minimums:
        low = np.minimum(groups.min(at + 1), 0).astype(form.scales)
        out.minimums[...] = low
        low = np.expand_dims(low, at + 1).astype(np.float32)
        top = groups.max(at + 1, keepdims=True) - low
    else:
        low = np.float32(0)
        top = np.abs(groups).max(at + 1, keepdims=True)
    scales = (top / _LARGEST[form.codec]).astype(form.scales)
    out.scales[...] = scales.squeeze(at + 1)
    wide = scales.astype(np.float32)
    codes = (groups - low) / np.where(wide == 0, 1, wide)
    if form.codec == FLOAT8:
        out.codes[...] = codes.astype(form.codec.dtype).reshape(out.codes.shape)
        return
    limits = (0, 15) if form.codec in (UINT4_PAIRS, UINT4) else (-127, 127)
    codes = np.clip(np.rint(codes), *limits).astype(form.codec.dtype)
    out.codes[...] = (pack(codes, at) if form.codec.paired else codes).reshape(out.codes.shape)
