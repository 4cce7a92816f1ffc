"""Matrices held as codes with scales, and products with them (weight-only quantisation).

Each value is ``code * scale``, or ``code * scale + minimum``, where a group of neighbours along the contracted axis
share one scale and one minimum; a group may be the whole axis. Codes are int8, float8_e4m3fn, or two 4-bit codes a
byte: a group's first half in the low nibbles, its second half in the high ones, as GGUF packs its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_VOCAB_CHUNK = 1024
"""Rows of a table that a CPU dequantises at a time: they stay in its cache until they are multiplied."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "minimums"),
    meta_fields=("axis", "packed"),
)
@dataclass(frozen=True)
class QuantisedMatrix:
    """Stands where a float matrix ``[..., inputs, outputs]`` or a table ``[vocab, embed]`` would.

    Attributes:
        codes: of the matrix' shape; half as long along `axis` when packed (then uint8).
        scales: of the matrix' shape, but one a group along `axis`.
        minimums: as `scales`; None where codes are signed.
        axis: the contracted one, negative: -2 of a matrix, -1 of a table.
        packed: two 4-bit codes a byte.
    """

    codes: Any
    scales: Any
    minimums: Any = None
    axis: int = field(default=-2)
    packed: bool = field(default=False)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix that this stands for."""
        shape = list(self.codes.shape)
        shape[self.axis] *= 2 if self.packed else 1
        return tuple(shape)

    def __getitem__(self, key: Any) -> QuantisedMatrix:
        if key is not Ellipsis:
            raise TypeError(f"a quantised matrix cannot be indexed with {key!r}: only products understand it")
        return self

    @property
    def T(self) -> QuantisedMatrix:
        """Transposed, of a matrix without leading dimensions."""
        minimums = None if self.minimums is None else self.minimums.T
        return QuantisedMatrix(self.codes.T, self.scales.T, minimums, -3 - self.axis, self.packed)

    def rows(self, ids: Int[Array, " ids"]) -> QuantisedMatrix:
        """Rows of a table; ids out of range read some row."""
        return jax.tree.map(lambda part: jnp.take(part, ids, axis=0, mode="clip"), self)

    def dequantised(self, dtype: jnp.dtype) -> Float[Array, "*matrix"]:
        """The matrix, computed in float32 and rounded to `dtype`."""
        axis = self.ndim + self.axis
        groups = self.scales.shape[axis]
        shape = self.codes.shape
        codes = self.codes.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
        if self.packed:
            codes = jnp.concatenate([codes & 15, codes >> 4], axis=axis + 1)
        values = codes.astype(jnp.float32) * jnp.expand_dims(self.scales, axis + 1).astype(jnp.float32)
        if self.minimums is not None:
            values = values + jnp.expand_dims(self.minimums, axis + 1).astype(jnp.float32)
        return values.astype(dtype).reshape(self.shape)

    @property
    def scales_follow(self) -> bool:
        """Whether an output has one scale, which can multiply the product in place of the codes."""
        return self.scales.shape[self.axis] == 1 and self.minimums is None


def quantised_dot(
    x: Float[Array, "tokens inputs"], matrix: QuantisedMatrix, out_dtype: jnp.dtype | None = None
) -> Float[Array, "tokens outputs"]:
    """``x @ matrix``, in `out_dtype` or that of `x`; `matrix` is [inputs, outputs], axis -2."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    if not matrix.scales_follow:
        weight = matrix.dequantised(x.dtype)
        return jnp.dot(x, weight, precision=precision, preferred_element_type=out_dtype or x.dtype)
    product = jnp.dot(x, matrix.codes.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)
    return (product * matrix.scales[0].astype(jnp.float32)).astype(out_dtype or x.dtype)


def quantised_table_dot(x: Float[Array, "tokens embed"], table: QuantisedMatrix) -> Float[Array, "tokens vocab"]:
    """``x @ table.T`` in float32; a CPU dequantises `_VOCAB_CHUNK` rows of the table at a time."""
    chunks, rest = divmod(table.shape[0], _VOCAB_CHUNK)
    plain = partial(_table_dot, x, table)
    if rest or chunks < 2:
        return plain()

    def by_chunks() -> Float[Array, "tokens vocab"]:
        cut = jax.tree.map(lambda part: part.reshape(chunks, _VOCAB_CHUNK, *part.shape[1:]), table)
        return jax.lax.map(partial(_chunk_dot, x), cut).reshape(-1, len(x)).T

    return jax.lax.platform_dependent(cpu=by_chunks, default=plain)


def _table_dot(x: Float[Array, "tokens embed"], table: QuantisedMatrix) -> Float[Array, "tokens vocab"]:
    return quantised_dot(x, table.T, jnp.float32)


def _chunk_dot(x: Float[Array, "tokens embed"], table: QuantisedMatrix) -> Float[Array, "chunk tokens"]:
    weight = table.dequantised(x.dtype)
    # XLA:CPU multiplies a matrix with one vector much faster than with a matrix of one column.
    product = (weight @ x[0])[:, None] if len(x) == 1 else weight @ x.T
    return product.astype(jnp.float32)
