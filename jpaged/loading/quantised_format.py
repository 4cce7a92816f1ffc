"""How a quantised parameter is held: its codes, what shares a scale, and how its parts lie on the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec

from jpaged.model_api import WeightSource
from pallas_kernels.quantised import QuantisedMatrix

INT8 = np.dtype(np.int8)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
PACKED = np.dtype(np.uint8)
"""Two 4-bit codes a byte."""


@dataclass(frozen=True)
class Format:
    """What a parameter is held in.

    Attributes:
        codes: `INT8`, `FP8` or `PACKED`.
        group: neighbours along the contracted axis that share a scale; 0 = all of them.
        scales: dtype of scales and minimums.
        minimums: a value is ``code * scale + minimum``.
    """

    codes: np.dtype
    group: int
    scales: np.dtype
    minimums: bool = False

    @classmethod
    def of(cls, matrix: QuantisedMatrix) -> Format:
        """The form of a matrix or of a stack of them."""
        groups = matrix.scales.shape[matrix.axis]
        group = 0 if groups == 1 else matrix.shape[matrix.axis] // groups
        return cls(np.dtype(matrix.codes.dtype), group, np.dtype(matrix.scales.dtype), matrix.minimums is not None)

    def as_json(self) -> dict[str, Any]:
        """To be read by `from_json`."""
        return {
            "codes": self.codes.name,
            "group": self.group,
            "scales": self.scales.name,
            "minimums": self.minimums,
        }

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Format:
        """Inverse of `as_json`."""
        codes, scales = np.dtype(jnp.dtype(said["codes"])), np.dtype(said["scales"])
        return cls(codes, said["group"], scales, said["minimums"])

    def fitted(self, source: WeightSource, shape: tuple[int, ...], shards: int, unit: int = 0) -> Format:
        """With groups that no shard's border cuts, and that lie within runs of `unit` values (0 = any).

        4-bit codes take a byte each where groups have an odd size.
        """
        if self.group == 0 and unit == 0:
            return self
        assert source.contracted is not None
        size = shape[source.contracted]
        part = size // shards if source.partition[source.contracted] is not None else size
        group = math.gcd(self.group or size, part, unit)
        codes = INT8 if self.codes == PACKED and group % 2 else self.codes
        return Format(codes, group, self.scales, self.minimums)

    def parts(
        self, axis: int, shape: tuple[int, ...], make: Callable[[tuple[int, ...], np.dtype], Any]
    ) -> QuantisedMatrix:
        """``make(shape, dtype)`` of codes, scales and minimums of a matrix of `shape` contracted along `axis`."""
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
        )


def partition_of(source: WeightSource, shape: tuple[int, ...]) -> PartitionSpec:
    """The partition of one part of a parameter: its own, except along an axis that shares one scale."""
    axes = list(source.partition)
    if source.contracted is not None and shape[source.contracted] == 1:
        axes[source.contracted] = None
    return PartitionSpec(*axes)
