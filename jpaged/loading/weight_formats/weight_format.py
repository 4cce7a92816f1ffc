"""Describes the format of a quantised parameter: its codec, its groups, and the partition of its parts on the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jpaged.model_api import WeightSource
from pallas_kernels.held_matrix import PermutedMatrix
from pallas_kernels.quantised import (
    E2M1_FLOATS,
    E2M1_PAIRS,
    FLOAT8,
    FP4_PAIRS,
    INT8,
    IQ4_PAIRS,
    NF4_PAIRS,
    UINT4,
    UINT4_PAIRS,
    Codec,
    QuantisedMatrix,
)

Coded = QuantisedMatrix | PermutedMatrix
"""A parameter held as codes."""


@dataclass(frozen=True)
class WeightFormat:
    """The format of a parameter.

    Attributes:
        codec: maps codes to numbers.
        group: neighbours along the contracted axis that share a scale; 0 = all of them.
        scales: dtype of scales and minimums.
        minimums: whether a value is ``code * scale + minimum``.
        rounds_rows: see `QuantisedMatrix.rounds_rows`.
        ordered: whether inputs are held sorted by group, as a `PermutedMatrix`.
    """

    codec: Codec
    group: int
    scales: np.dtype
    minimums: bool = False
    rounds_rows: bool = True
    ordered: bool = False

    @classmethod
    def of(cls, matrix: Coded) -> WeightFormat:
        """Return the format of a matrix or of a stack of them."""
        if isinstance(matrix, PermutedMatrix):
            return replace(cls.of(matrix.matrix), ordered=True)
        groups = matrix.scales.shape[matrix.axis]
        group = 0 if groups == 1 else matrix.shape[matrix.axis] // groups
        return cls(matrix.codec, group, np.dtype(matrix.scales.dtype), matrix.minimums is not None, matrix.rounds_rows)

    def as_json(self) -> dict[str, Any]:
        """Return the format as JSON fields, which `from_json` reads."""
        named = {"codec": self.codec.name} if self.codec in NAMED_CODECS else {}
        return named | {
            "codes": self.codec.dtype.name,
            "group": self.group,
            "scales": self.scales.name,
            "minimums": self.minimums,
            "e2m1": self.codec == E2M1_PAIRS,
            "rounds_rows": self.rounds_rows,
            "ordered": self.ordered,
        }

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> WeightFormat:
        """Return the format that `as_json` wrote; version 0.2.0 wrote neither `rounds_rows` nor `ordered`."""
        codec = E2M1_PAIRS if said.get("e2m1") else _CODEC_OF_DTYPE[np.dtype(jnp.dtype(said["codes"]))]
        if "codec" in said:
            codec = next(one for one in NAMED_CODECS if one.name == said["codec"])
        return cls(
            codec,
            said["group"],
            np.dtype(said["scales"]),
            said["minimums"],
            said.get("rounds_rows", True),
            said.get("ordered", False),
        )

    def fitted(self, source: WeightSource, shape: tuple[int, ...], shards: int, unit: int = 0) -> WeightFormat:
        """Return the format with groups that no shard border cuts and that lie within runs of `unit` values (0 = no
        limit).

        If groups have an odd size, 4-bit codes take a byte each, as int8, which may not hold them: see `INT8_HOLDS`.
        e2m1 codes are then doubled, with float scales.
        """
        unit = 0 if self.ordered else unit  # sorted inputs lie in no runs
        if self.group == 0 and unit == 0:
            return self._with_group(shape[source.contracted or 0], replaced=0)
        assert source.contracted is not None
        size = shape[source.contracted]
        part = size // shards if source.partition[source.contracted] is not None else size
        group = math.gcd(self.group or size, part, unit)
        return self._with_group(group, replaced=group)

    def _with_group(self, group: int, replaced: int) -> WeightFormat:
        if not self.codec.paired or group % 2 == 0:
            return replace(self, group=replaced)
        scales = np.dtype(np.float32) if self.codec == E2M1_PAIRS else self.scales
        return replace(self, codec=INT8, group=replaced, scales=scales)

    def parts(self, axis: int, shape: tuple[int, ...], make: Callable[[tuple[int, ...], np.dtype], Any]) -> Coded:
        """Return codes, scales, minimums and order, each made by ``make(shape, dtype)``, of a matrix of `shape`
        contracted along `axis`."""
        size = shape[axis]
        codes, scales = list(shape), list(shape)
        codes[axis] = size // 2 if self.codec.paired else size
        scales[axis] = size // self.group if self.group else 1
        matrix = QuantisedMatrix(
            make(tuple(codes), self.codec.dtype),
            make(tuple(scales), self.scales),
            make(tuple(scales), self.scales) if self.minimums else None,
            axis,
            self.codec,
            self.rounds_rows,
        )
        return PermutedMatrix(make(shape[:-1], np.dtype(np.int32)), matrix) if self.ordered else matrix


NAMED_CODECS = (E2M1_FLOATS, NF4_PAIRS, FP4_PAIRS, IQ4_PAIRS)
"""Codecs that a saved checkpoint stores by name: their dtype is another codec's too."""
INT8_HOLDS = frozenset({INT8, UINT4_PAIRS, E2M1_PAIRS, E2M1_FLOATS, IQ4_PAIRS})
"""Codecs whose numbers, doubled where they are halves, are int8."""
_CODEC_OF_DTYPE = {codec.dtype: codec for codec in (INT8, FLOAT8, UINT4, UINT4_PAIRS)}

StatePath = tuple[str | int, ...]
"""Path of a parameter in a model's state, where several layers' are one if they are stacked."""
WeightFormats = Mapping[StatePath, WeightFormat]
"""Formats by the paths of parameters: what lies in one array has one format."""


def partition_of(source: WeightSource, shape: tuple[int, ...]) -> PartitionSpec:
    """Return the partition of one part of a parameter: the parameter's own, except that an axis with one shared scale
    is not split, and that every device has the whole order of inputs."""
    axes = list(source.partition)
    if source.contracted is not None and len(shape) < len(axes):
        return PartitionSpec(*axes[:-2], None)
    if source.contracted is not None and shape[source.contracted] == 1:
        axes[source.contracted] = None
    return PartitionSpec(*axes)


def joined(formats: list[WeightFormat]) -> WeightFormat | None:
    """Return the smallest format that holds the values of all these formats exactly; None if there is none.

    Other codecs than those of `INT8_HOLDS` do not mix.
    """
    codecs = {one.codec for one in formats}
    if len(codecs) == 1:
        codec = formats[0].codec
    elif not codecs <= INT8_HOLDS:
        return None
    else:
        codec = INT8
    scales = [np.dtype(np.float32) if one.codec == E2M1_PAIRS and codec == INT8 else one.scales for one in formats]
    return WeightFormat(
        codec,
        math.gcd(*(one.group for one in formats)),
        max(scales, key=lambda dtype: dtype.itemsize),
        minimums=any(one.minimums for one in formats),
        rounds_rows=all(one.rounds_rows for one in formats),
        ordered=any(one.ordered for one in formats),
    )
