"""Says how a quantised parameter is held: its codes, what shares a scale, and how its parts lie on the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec

from jpaged.model_api import WeightSource
from pallas_kernels.quantised import QuantisedMatrix

INT8 = np.dtype(np.int8)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
UINT4 = np.dtype(ml_dtypes.uint4)
"""The dtype of 4-bit codes that a TPU packs by itself."""
PACKED = np.dtype(np.uint8)
"""The dtype of packed codes: two 4-bit codes a byte."""


@dataclass(frozen=True)
class Format:
    """Says what a parameter is held in.

    Attributes:
        codes: `INT8`, `FP8`, `UINT4` or `PACKED`.
        group: neighbours along the contracted axis that share a scale; 0 = all of them.
        scales: dtype of scales and minimums.
        minimums: whether a value is ``code * scale + minimum``.
        e2m1: whether packed codes are 4-bit floats, and scales, in uint8, the exponents of two that MXFP4 has.
    """

    codes: np.dtype
    group: int
    scales: np.dtype
    minimums: bool = False
    e2m1: bool = False

    @classmethod
    def of(cls, matrix: QuantisedMatrix) -> Format:
        """Return the format of a matrix or of a stack of them."""
        groups = matrix.scales.shape[matrix.axis]
        group = 0 if groups == 1 else matrix.shape[matrix.axis] // groups
        codes, scales = np.dtype(matrix.codes.dtype), np.dtype(matrix.scales.dtype)
        return cls(codes, group, scales, matrix.minimums is not None, matrix.e2m1)

    def as_json(self) -> dict[str, Any]:
        """Return the format as JSON fields, which `from_json` reads."""
        return {
            "codes": self.codes.name,
            "group": self.group,
            "scales": self.scales.name,
            "minimums": self.minimums,
            "e2m1": self.e2m1,
        }

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Format:
        """Return the format that `as_json` wrote."""
        codes, scales = np.dtype(jnp.dtype(said["codes"])), np.dtype(said["scales"])
        return cls(codes, said["group"], scales, said["minimums"], said.get("e2m1", False))

    def fitted(self, source: WeightSource, shape: tuple[int, ...], shards: int, unit: int = 0) -> Format:
        """Return the format with groups that no shard's border cuts, and that lie within runs of `unit` values (0 =
        any).

        4-bit codes take a byte each where groups have an odd size; e2m1's are doubled then, with floats for scales.
        """
        if self.group == 0 and unit == 0:
            return self
        assert source.contracted is not None
        size = shape[source.contracted]
        part = size // shards if source.partition[source.contracted] is not None else size
        group = math.gcd(self.group or size, part, unit)
        if self.codes != PACKED or group % 2 == 0:
            return replace(self, group=group)
        return Format(INT8, group, np.dtype(np.float32) if self.e2m1 else self.scales, self.minimums)

    def parts(
        self, axis: int, shape: tuple[int, ...], make: Callable[[tuple[int, ...], np.dtype], Any]
    ) -> QuantisedMatrix:
        """Return codes, scales and minimums, each made by ``make(shape, dtype)``, of a matrix of `shape` contracted
        along `axis`."""
        size = shape[axis]
        codes, scales = list(shape), list(shape)
        codes[axis] = size // 2 if self.codes == PACKED else size
        scales[axis] = size // self.group if self.group else 1
        return QuantisedMatrix(
            make(tuple(codes), self.codes),
            make(tuple(scales), self.scales),
            make(tuple(scales), self.scales) if self.minimums else None,
            axis,
            self.codes == PACKED,
            self.e2m1,
        )


def partition_of(source: WeightSource, shape: tuple[int, ...]) -> PartitionSpec:
    """Return the partition of one part of a parameter: its own, except along an axis that shares one scale."""
    axes = list(source.partition)
    if source.contracted is not None and shape[source.contracted] == 1:
        axes[source.contracted] = None
    return PartitionSpec(*axes)


Forms = Mapping[tuple[str, ...], Format]
"""Formats by `WeightSource.path`: all layers' parameters of one name have one form, so that they can be stacked."""
