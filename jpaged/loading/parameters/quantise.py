"""Turns float matrices into codes with scales, by rounding to nearest, on the host."""

from __future__ import annotations

import math

import numpy as np

from jpaged.loading.code_format import FP8, INT8, PACKED, UINT4, Format
from jpaged.model_api import HostArray
from pallas_kernels.quantised import QuantisedMatrix

_CHUNK_BYTES = 32 << 20
"""Bytes of float32 held at a time, so that a large matrix is never float32 as a whole."""

_LARGEST = {INT8: 127.0, FP8: 448.0, PACKED: 15.0, UINT4: 15.0}
"""Largest code: int8 and fp8 are symmetric, those of four bits count from the group's minimum."""


def quantise(array: HostArray, axis: int, form: Format) -> QuantisedMatrix:
    """Quantise a float matrix ``[..., inputs, outputs]``, contracted along `axis` (negative), to codes in `form`.

    int8 and fp8: ``scale = max |w| / largest code`` of a group. 4 bits: ``scale = (max - min) / 15`` over a range
    that includes 0.
    """
    out = form.parts(axis, array.shape, np.empty)
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
    return QuantisedMatrix(matrix.codes[at], matrix.scales[at], minimums, matrix.axis, matrix.packed, matrix.e2m1)


def _quantise_lines(lines: np.ndarray, axis: int, form: Format, out: QuantisedMatrix) -> None:
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
    scales = (top / _LARGEST[form.codes]).astype(form.scales)
    out.scales[...] = scales.squeeze(at + 1)
    wide = scales.astype(np.float32)
    codes = (groups - low) / np.where(wide == 0, 1, wide)
    if form.codes == FP8:
        out.codes[...] = codes.astype(FP8).reshape(out.codes.shape)
        return
    limits = (0, 15) if form.codes in (PACKED, UINT4) else (-127, 127)
    codes = np.clip(np.rint(codes), *limits).astype(form.codes)
    out.codes[...] = (pack(codes, at) if form.codes == PACKED else codes).reshape(out.codes.shape)


def grouped(array: np.ndarray, axis: int, groups: int) -> np.ndarray:
    """Reshape ``[..., inputs, ...]`` to ``[..., groups, inputs / groups, ...]``; `axis` counts from the start."""
    shape = array.shape
    return array.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])


def pack(codes: np.ndarray, axis: int) -> np.ndarray:
    """Pack 4-bit codes ``[..., groups, size, ...]``, groups along `axis`, into ``[..., groups, size / 2, ...]``
    bytes."""
    low, high = np.split(codes, 2, axis + 1)
    return low | high << 4
