"""Multiplies with quantised matrices on TPUs, in jnp that their compiler fuses: no float copy of a matrix is made.

Codes of four bits are converted to bfloat16 and multiplied group by group; then each group's product is scaled. If the
codes were scaled instead, the compiler would write the whole matrix in bfloat16 to memory and read it again. Codes of
eight bits multiply many rows, as in a prompt, as integers: each row is rounded to eight bits with a separate scale
(w8a8), and the matrix units multiply integers twice as fast. XLA may partition all of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantised import INT8, UINT4, QuantisedMatrix
from pallas_kernels.quantised_matmul import reference
from pallas_kernels.quantised_matmul.reference import quantised_matmul_grouped, quantised_matmul_table

__all__ = ["quantised_matmul", "quantised_matmul_grouped", "quantised_matmul_table"]

FEW_ROWS = 128
"""Most rows that are multiplied with all groups at once; the partial products, [groups, rows, outputs], of more would
not stay in VMEM."""
MANY_ROWS = 256
"""From so many rows on, a product takes longer than reading its matrix, so that integers pay."""


def quantised_matmul(
    x: Float[Array, "rows inputs"], matrix: QuantisedMatrix, out_dtype: jnp.dtype, *, input_shards: int = 1
) -> Float[Array, "rows outputs"]:
    """See `pallas_kernels.quantised_matmul.quantised_matmul`.

    Args:
        input_shards: shards over which the contracted axis is split; only one sum, at the end, runs across them.
    """
    if x.dtype == jnp.bfloat16 and matrix.axis == -2:
        if matrix.codec == UINT4:
            return _by_groups(x, matrix, input_shards).astype(out_dtype)
        as_integers = matrix.codec == INT8 and matrix.rounds_rows and matrix.scales_follow
        if as_integers and len(x) >= MANY_ROWS:
            return _as_integers(x, matrix, input_shards, out_dtype)
    return reference.quantised_matmul(x, matrix, out_dtype)


def _by_groups(x: Float[Array, "rows inputs"], matrix: QuantisedMatrix, shards: int) -> Float[Array, "rows outputs"]:
    groups, outputs = matrix.scales.shape
    scales = matrix.scales.astype(jnp.float32)
    grouped = x.reshape(len(x), groups, -1)
    codes = matrix.codes.reshape(groups, -1, outputs)
    # Few rows: one batched product over all groups. Many rows: a loop, so that only one group's product is live.
    if len(x) <= FEW_ROWS:
        parts = jnp.einsum("rgi,gio->gro", grouped, codes.astype(x.dtype), preferred_element_type=jnp.float32)
        product = jnp.sum(parts * scales[:, None], axis=0)
    else:
        product = _one_after_another(grouped, codes, scales, shards)
    if matrix.minimums is None:
        return product
    # A group's sum(x * minimum) is its minimum times its sum of x: a small product over the groups.
    sums = grouped.astype(jnp.float32).sum(axis=2)
    return product + jnp.dot(sums, matrix.minimums.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def _one_after_another(
    grouped: Float[Array, "rows groups size"],
    codes: Float[Array, "groups size outputs"],
    scales: Float[Array, "groups outputs"],
    shards: int,
) -> Float[Array, "rows outputs"]:
    """Return the sum of the groups' scaled products; each turn of the loop takes one group of every shard."""
    # Shards are a separate axis of x, codes and sums, so that XLA partitions the loop without communication.
    rows, groups, size = grouped.shape
    outputs = scales.shape[1]
    turns = groups // shards
    x = grouped.reshape(rows, shards, turns, size)
    codes = codes.reshape(shards, turns, size, outputs)
    scales = scales.reshape(shards, turns, outputs)

    def add(turn: Int[Array, ""], total: Array) -> Array:
        mine, theirs = x[:, :, turn], codes[:, turn].astype(x.dtype)
        part = jnp.einsum("rsi,sio->sro", mine, theirs, preferred_element_type=jnp.float32)
        return total + part * scales[:, turn, None]

    return jax.lax.fori_loop(0, turns, add, jnp.zeros((shards, rows, outputs), jnp.float32)).sum(axis=0)


def _as_integers(
    x: Float[Array, "rows inputs"], matrix: QuantisedMatrix, shards: int, out_dtype: jnp.dtype
) -> Float[Array, "rows outputs"]:
    """Multiply rows that are rounded to eight bits; each shard's part of a row has a separate scale."""
    # The largest number of each row's part becomes 127; a part of zeros has step 0, and is divided by 1 instead.
    wide = x.astype(jnp.float32).reshape(len(x), shards, -1)
    steps = jnp.abs(wide).max(axis=2, keepdims=True) / 127
    rounded = jnp.rint(wide / jnp.where(steps == 0, 1, steps)).astype(jnp.int8)
    codes = matrix.codes.reshape(shards, -1, matrix.shape[1])
    parts = jnp.einsum("rsi,sio->sro", rounded, codes, preferred_element_type=jnp.int32)
    scaled = parts.astype(jnp.float32) * jnp.moveaxis(steps, 1, 0) * matrix.scales[0].astype(jnp.float32)
    return scaled.astype(out_dtype).sum(axis=0, dtype=out_dtype)
