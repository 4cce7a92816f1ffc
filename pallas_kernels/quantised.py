"""Holds matrices as codes with scales (weight-only quantisation); `quantised_matmul` multiplies with them.

Each value is ``code * scale``, or ``code * scale + minimum``, where a group of neighbours along the contracted axis
share one scale and one minimum; a group may be the whole axis. Codes are int8, float8_e4m3fn, uint4 (on TPUs, whose
memory packs them), or two 4-bit codes a byte: a group's first half in the low nibbles, its second half in the high
ones, as GGUF packs its blocks. 4-bit codes are numbers from 0 to 15, or the floats e2m1 of MXFP4 (OCP Microscaling
Formats 1.0, 2023), whose scales are e8m0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class HeldMatrix(ABC):
    """Stands where an array of a matrix would, in a form that only products and `read_rows` understand."""

    @property
    @abstractmethod
    def ndim(self) -> int:
        """Return the number of dimensions of what this stands for."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return the shape of what this stands for."""

    @abstractmethod
    def read_rows(self, ids: Int[Array, " ids"], dtype: jnp.dtype) -> Float[Array, "ids embed"]:
        """Return the rows of a table that have these ids; ids out of range read some row."""

    @abstractmethod
    def dequantised(self, dtype: jnp.dtype) -> Float[Array, "*matrix"]:
        """Return the matrix as an array, rounded to `dtype`."""

    def __getitem__(self, key: Any) -> Self:
        if key is not Ellipsis:
            raise TypeError(f"a {type(self).__name__} cannot be indexed with {key!r}: only products understand it")
        return self


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "minimums"),
    meta_fields=("axis", "packed", "e2m1"),
)
@dataclass(frozen=True)
class QuantisedMatrix(HeldMatrix):
    """Stands where a float matrix ``[..., inputs, outputs]`` or a table ``[vocab, embed]`` would.

    Attributes:
        codes: an array of the matrix' shape; half as long along `axis` when packed (then uint8).
        scales: an array of the matrix' shape, but with one entry a group along `axis`.
        minimums: has the shape of `scales`; None where codes are signed.
        axis: the contracted one, negative: -2 of a matrix, -1 of a table.
        packed: whether a byte holds two 4-bit codes.
        e2m1: whether the packed codes are floats of a sign, two bits of exponent and one of mantissa; scales are then
            uint8, each the exponent of a power of two, plus 127.
    """

    codes: Any
    scales: Any
    minimums: Any = None
    axis: int = field(default=-2)
    packed: bool = field(default=False)
    e2m1: bool = field(default=False)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the matrix that this stands for."""
        shape = list(self.codes.shape)
        shape[self.axis] *= 2 if self.packed else 1
        return tuple(shape)

    @property
    def T(self) -> QuantisedMatrix:
        """Return the transposed matrix, where there are no leading dimensions."""
        minimums = None if self.minimums is None else self.minimums.T
        return QuantisedMatrix(self.codes.T, self.scales.T, minimums, -3 - self.axis, self.packed, self.e2m1)

    def rows(self, ids: Int[Array, " ids"]) -> QuantisedMatrix:
        """Return the rows of a table that have these ids; ids out of range read some row."""
        return jax.tree.map(lambda part: jnp.take(part, ids, axis=0, mode="clip"), self)

    def read_rows(self, ids: Int[Array, " ids"], dtype: jnp.dtype) -> Float[Array, "ids embed"]:
        return self.rows(ids).dequantised(dtype)

    def dequantised(self, dtype: jnp.dtype) -> Float[Array, "*matrix"]:
        """Return the matrix, computed in float32 and rounded to `dtype`."""
        axis = self.ndim + self.axis
        groups = self.scales.shape[axis]
        shape = self.codes.shape
        codes = self.codes.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
        if self.packed:
            codes = jnp.concatenate([codes & 15, codes >> 4], axis=axis + 1)
        scales = jnp.expand_dims(self.scales, axis + 1)
        wide, factors = (_e2m1(codes), _e8m0(scales)) if self.e2m1 else (codes, scales)
        values = wide.astype(jnp.float32) * factors.astype(jnp.float32)
        if self.minimums is not None:
            values = values + jnp.expand_dims(self.minimums, axis + 1).astype(jnp.float32)
        return values.astype(dtype).reshape(self.shape)

    @property
    def scales_follow(self) -> bool:
        """Tell whether an output has one scale, which can multiply the product in place of the codes."""
        return self.scales.shape[self.axis] == 1 and self.minimums is None and not self.packed


def _e2m1(codes: Int[Array, "*codes"]) -> Float[Array, "*codes"]:
    """Return the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 of 4-bit codes; the highest bit is the sign."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent, 1) - 1)
    return jnp.where(codes > 7, -0.5, 0.5) * doubled.astype(jnp.float32)


def _e8m0(bits: Int[Array, "*scales"]) -> Float[Array, "*scales"]:
    """Return ``2 ** (bits - 127)``; 255 means no number."""
    wide = bits.astype(jnp.uint32)
    pattern = jnp.where(wide == 0, jnp.uint32(0x00400000), wide << 23)  # 2 ** -127 has a pattern of its own
    pattern = jnp.where(wide == 255, jnp.uint32(0x7FC00000), pattern)
    return jax.lax.bitcast_convert_type(pattern, jnp.float32)
