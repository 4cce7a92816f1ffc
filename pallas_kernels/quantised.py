"""Holds matrices as codes with scales (weight-only quantisation); `pallas_kernels.products` multiplies with them.

Each value is ``code * scale``, or ``code * scale + minimum``. A group of neighbours along the contracted axis shares
one scale and one minimum; a group may be the whole axis. `pallas_kernels.codecs` lists the kinds of codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.codecs import INT8, Codec
from pallas_kernels.held_matrix import HeldMatrix


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "minimums"),
    meta_fields=("axis", "codec", "rounds_rows"),
)
@dataclass(frozen=True)
class QuantisedMatrix(HeldMatrix):
    """Takes the place of a float matrix ``[..., inputs, outputs]`` or a table ``[vocab, embed]``.

    Attributes:
        codes: an array of the matrix' shape, of ``codec.dtype``; half as long along `axis` when two share a byte.
        scales: an array of the matrix' shape, but with one entry a group along `axis`.
        minimums: has the shape of `scales`; None where values are ``code * scale``.
        axis: the contracted one, negative: -2 of a matrix, -1 of a table.
        codec: what the codes stand for.
        rounds_rows: whether a product may round what the matrix multiplies to 8 bits, as a CPU's tiles, a TPU's
            integers and a GPU's float8 do. False: rows are multiplied in their own dtype on every platform.
    """

    codes: Any
    scales: Any
    minimums: Any = None
    axis: int = field(default=-2)
    codec: Codec = field(default=INT8)
    rounds_rows: bool = field(default=True)

    has_codes = True

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.codes.shape)
        shape[self.axis] *= 2 if self.codec.paired else 1
        return tuple(shape)

    @property
    def T(self) -> QuantisedMatrix:
        """Return the transposed matrix. There must be no leading dimensions."""
        minimums = None if self.minimums is None else self.minimums.T
        return QuantisedMatrix(self.codes.T, self.scales.T, minimums, -3 - self.axis, self.codec, self.rounds_rows)

    def rows(self, ids: Int[Array, " ids"]) -> QuantisedMatrix:
        """Return the rows of a table with these ids, still as codes. An id out of range reads an arbitrary row."""
        return jax.tree.map(lambda part: jnp.take(part, ids, axis=0, mode="clip"), self)

    def read_rows(self, ids: Int[Array, " ids"], dtype: jnp.dtype) -> Float[Array, "ids embed"]:
        return self.rows(ids).dequantised(dtype)

    def dequantised(self, dtype: jnp.dtype) -> Float[Array, "*matrix"]:
        """Return the matrix, computed in float32 and rounded to `dtype`."""
        axis = self.ndim + self.axis
        groups = self.scales.shape[axis]
        shape = self.codes.shape
        codes = self.codes.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
        if self.codec.paired:
            codes = jnp.concatenate([codes & 15, codes >> 4], axis=axis + 1)
        values = self.codec.values(codes) * self.codec.factors(jnp.expand_dims(self.scales, axis + 1))
        if self.minimums is not None:
            values = values + jnp.expand_dims(self.minimums, axis + 1).astype(jnp.float32)
        return values.astype(dtype).reshape(self.shape)

    @property
    def scales_follow(self) -> bool:
        """Tell whether an output has one scale, which can multiply the product in place of the codes."""
        return self.scales.shape[self.axis] == 1 and self.minimums is None and not self.codec.paired

    def as_saved(self, dtype: jnp.dtype) -> QuantisedMatrix:
        return self

    def parts(self) -> Mapping[str, Any]:
        parts = {"codes": self.codes, "scales": self.scales, "minimums": self.minimums}
        return {name: part for name, part in parts.items() if part is not None}
