"""Undoes a weight source's conversion, so that parameters laid out for one mesh can be loaded on another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from jpaged.model_api import HostArray


def unconvert(
    convert: Callable[..., HostArray], shapes: Sequence[tuple[int, ...]], parameter: np.ndarray
) -> list[np.ndarray]:
    """Return the tensors, of these shapes, from which `convert` makes this parameter.

    Converters move, repeat and zero-pad values (`HeadLayout`, fused and transposed projections). Converting running
    numbers shows where each value goes, so no family has to write an inverse of its converters.

    Raises:
        ValueError: `convert` does anything else with the values.
    """
    ends = list(accumulate(map(math.prod, shapes), initial=0))
    count = ends[-1]

    def split(flat: np.ndarray) -> list[np.ndarray]:
        return [flat[a:b].reshape(shape) for (a, b), shape in zip(pairwise(ends), shapes, strict=True)]

    number = np.int32 if count < np.iinfo(np.int32).max else np.int64
    origins = np.asarray(convert(*split(np.arange(1, count + 1, dtype=number))))
    if origins.shape != parameter.shape or not np.issubdtype(origins.dtype, np.integer):
        raise ValueError(f"conversion gives {origins.dtype} {origins.shape} for {parameter.shape}")
    if origins.min() >= 0 and origins.max() <= count:
        reached = np.zeros(count + 1, bool)
        reached[origins] = True
        flat = np.empty(count + 1, parameter.dtype)
        flat[origins] = parameter
        tensors = split(flat[1:])
        if reached[1:].all() and np.array_equal(_bits(np.asarray(convert(*tensors))), _bits(parameter)):
            return tensors
    raise ValueError("conversion does more than move, repeat and pad values")


def _bits(array: np.ndarray) -> np.ndarray:
    """Return an array's bytes, so that NaN equals itself."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
