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


_FITS = 4
"""Times that scales and minimums are fitted to codes. Together they lower the squared error of normal weights by a
tenth, and each costs as much time as rounding does."""


def quantise(array: HostArray, axis: int, form: WeightFormat, *, fits_scales: bool = False) -> QuantisedMatrix:
    """Quantise a float matrix ``[..., inputs, outputs]``, contracted along `axis` (negative), to codes in `form`.

    int8 and fp8: ``scale = max |w| / largest code`` of a group. 4 bits: ``scale = (max - min) / 15`` over a range
    that includes 0.

    Args:
        fits_scales: in a format with minimums, fit the scale and the minimum of each group to its codes by least
            squares, round again, and keep what has the least squared error of a few such turns.
    """
    out = form.parts(axis, array.shape, np.empty)
    assert isinstance(out, QuantisedMatrix)
    along = -3 - axis  # the axis whose lines are quantised independently
    size = max(1, _CHUNK_BYTES // (4 * math.prod(array.shape) // array.shape[along]))
    for start in range(0, array.shape[along], size):
        lines = [slice(None)] * len(array.shape)
        lines[along] = slice(start, start + size)
        at = tuple(lines)
        lines_of = np.asarray(array[at], np.float32)
        _quantise_lines(lines_of, axis, form, _at(out, at), fits_scales=fits_scales and form.minimums)
    return out


def _at(matrix: QuantisedMatrix, at: tuple[slice, ...]) -> QuantisedMatrix:
    minimums = None if matrix.minimums is None else matrix.minimums[at]
    return QuantisedMatrix(matrix.codes[at], matrix.scales[at], minimums, matrix.axis, matrix.codec)


def _quantise_lines(
    lines: np.ndarray, axis: int, form: WeightFormat, out: QuantisedMatrix, *, fits_scales: bool
) -> None:
    at = lines.ndim + axis
    groups = grouped(lines, at, out.scales.shape[at])
    if form.minimums:
        low = np.minimum(groups.min(at + 1, keepdims=True), 0).astype(form.scales)
        top = groups.max(at + 1, keepdims=True) - low.astype(np.float32)
    else:
        low = np.zeros((), form.scales)
        top = np.abs(groups).max(at + 1, keepdims=True)
    scales = (top / _LARGEST[form.codec]).astype(form.scales)
    if fits_scales:
        scales, low = _fitted(groups, scales, low, at + 1, _LARGEST[form.codec])
    out.scales[...] = scales.squeeze(at + 1)
    if form.minimums:
        out.minimums[...] = low.squeeze(at + 1)
    wide, low = scales.astype(np.float32), low.astype(np.float32)
    codes = (groups - low) / np.where(wide == 0, 1, wide)
    if form.codec == FLOAT8:
        out.codes[...] = codes.astype(form.codec.dtype).reshape(out.codes.shape)
        return
    limits = (0, 15) if form.codec in (UINT4_PAIRS, UINT4) else (-127, 127)
    codes = np.clip(np.rint(codes), *limits).astype(form.codec.dtype)
    out.codes[...] = (pack(codes, at) if form.codec.paired else codes).reshape(out.codes.shape)


def _fitted(
    groups: np.ndarray, scales: np.ndarray, low: np.ndarray, axis: int, largest: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales and minimums with the least squared error among the given ones and those of `_FITS` turns."""
    best, least = (scales, low), np.full(scales.shape, np.inf, np.float32)
    mean = groups.mean(axis, keepdims=True)
    for _ in range(_FITS + 1):
        wide = scales.astype(np.float32)
        codes = np.clip(np.rint((groups - low.astype(np.float32)) / np.where(wide == 0, 1, wide)), 0, largest)
        error = np.square(codes * wide + low.astype(np.float32) - groups).sum(axis, keepdims=True)
        better = error < least
        least = np.where(better, error, least)
        best = np.where(better, scales, best[0]), np.where(better, low, best[1])
        # Least squares of groups = scale * codes + minimum.
        middle = codes.mean(axis, keepdims=True)
        spread = np.square(codes - middle).sum(axis, keepdims=True)
        slope = ((codes - middle) * groups).sum(axis, keepdims=True) / np.where(spread == 0, 1, spread)
        scales = np.where(spread == 0, scales, slope.astype(scales.dtype))
        low = (mean - scales.astype(np.float32) * middle).astype(low.dtype)
    return best
