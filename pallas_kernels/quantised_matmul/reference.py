"""Multiplies with quantised matrices in plain jnp, for any backend; XLA may partition the products."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised import QuantisedMatrix

_VOCAB_CHUNK = 1024
"""Rows of a table that a CPU dequantises at a time, so that they stay in its cache until they are multiplied."""


def quantised_matmul(
    x: Float[Array, "rows inputs"], matrix: QuantisedMatrix, out_dtype: jnp.dtype
) -> Float[Array, "rows outputs"]:
    """See `pallas_kernels.quantised_matmul.quantised_matmul`."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    if not matrix.scales_follow:
        weight = matrix.dequantised(x.dtype)
        return jnp.dot(x, weight, precision=precision, preferred_element_type=out_dtype)
    product = jnp.dot(x, matrix.codes.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)
    return (product * matrix.scales[0].astype(jnp.float32)).astype(out_dtype)


def quantised_matmul_grouped(
    x: Float[Array, "rows inputs"], table: QuantisedMatrix, counts: Int[Array, " experts"]
) -> Float[Array, "rows outputs"]:
    """See `pallas_kernels.quantised_matmul.quantised_matmul_grouped`; all experts' matrices are dequantised."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.ragged_dot(x, table.dequantised(x.dtype), counts.astype(jnp.int32), precision=precision)


def quantised_matmul_table(x: Float[Array, "rows embed"], table: QuantisedMatrix) -> Float[Array, "rows vocab"]:
    """See `pallas_kernels.quantised_matmul.quantised_matmul_table`; a CPU multiplies `_VOCAB_CHUNK` rows at a time."""
    chunks, rest = divmod(table.shape[0], _VOCAB_CHUNK)
    whole = partial(quantised_matmul, x, table.T, jnp.dtype(jnp.float32))
    if rest or chunks < 2:
        return whole()

    def by_chunks() -> Float[Array, "rows vocab"]:
        cut = jax.tree.map(lambda part: part.reshape(chunks, _VOCAB_CHUNK, *part.shape[1:]), table)
        return jax.lax.map(partial(_chunk_product, x), cut).reshape(-1, len(x)).T

    return jax.lax.platform_dependent(cpu=by_chunks, default=whole)


def _chunk_product(x: Float[Array, "rows embed"], table: QuantisedMatrix) -> Float[Array, "chunk rows"]:
    weight = table.dequantised(x.dtype)
    # XLA:CPU multiplies a matrix with one vector much faster than with a matrix of one column.
    product = (weight @ x[0])[:, None] if len(x) == 1 else weight @ x.T
    return product.astype(jnp.float32)


def multiply_as_float8(
    x: Float[Array, "rows inputs"], matrix: QuantisedMatrix, out_dtype: jnp.dtype
) -> Float[Array, "rows outputs"]:
    """Return the product of rows that are rounded to float8_e4m3fn, each with a separate scale (w8a8).

    Some devices' matrix units multiply float8 twice as fast as bfloat16.

    Args:
        matrix: has float8_e4m3fn codes and one scale per output. XLA may partition it.
    """
    wide = x.astype(jnp.float32)
    steps = jnp.abs(wide).max(axis=1, keepdims=True) / float(jnp.finfo(jnp.float8_e4m3fn).max)
    rounded = (wide / jnp.where(steps == 0, 1, steps)).astype(jnp.float8_e4m3fn)
    product = jnp.dot(rounded, matrix.codes, preferred_element_type=jnp.float32)
    return (product * steps * matrix.scales[0].astype(jnp.float32)).astype(out_dtype)
