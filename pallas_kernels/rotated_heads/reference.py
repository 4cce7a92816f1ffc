"""Implements rotated_heads in plain jnp, as the reference of the other versions."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.row_ops import rms_norm
from pallas_kernels.stacked_row import StackedRow, vector_of


class HeadNorms(NamedTuple):
    """Root-mean-square norms over head_dim, one of each head's queries and one of its keys (Qwen3, Gemma 3).

    A head is rounded to its dtype between norm and rotation, as `pallas_kernels.row_ops.rms_norm` rounds.

    Attributes:
        q, k: what normed lanes are multiplied by, less `offset`.
        eps: is added to the mean of squares.
        offset: see `pallas_kernels.row_ops.rms_norm`.
    """

    q: Float[Array, " head_dim"] | StackedRow
    k: Float[Array, " head_dim"] | StackedRow
    eps: float
    offset: float = 0.0

    @property
    def factors(self) -> Float[Array, "2 head_dim"]:
        """Return what queries and keys are multiplied by, float32."""
        return self.offset + jnp.stack([vector_of(self.q), vector_of(self.k)]).astype(jnp.float32)


def rotated_heads(
    joined: Float[Array, "tokens kv_heads rows head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    norms: HeadNorms | None = None,
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.rotated_heads.rotated_heads`."""
    if norms is not None:
        q, k = (
            rms_norm(x, scale, norms.eps, offset=norms.offset)
            for x, scale in ((joined[:, :, :-2], norms.q), (joined[:, :, -2:-1], norms.k))
        )
        joined = jnp.concatenate([q, k, joined[:, :, -1:]], axis=2)
    half = cos.shape[1]
    c, s = cos[:, None, None], sin[:, None, None]
    left, right, rest = jnp.split(joined[:, :, :-1], (half, 2 * half), axis=-1)
    left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    turned = jnp.concatenate([left * c - right * s, right * c + left * s], axis=-1).astype(joined.dtype)
    turned = jnp.concatenate([turned, rest], axis=-1)
    return turned[:, :, :-1], turned[:, :, -1], joined[:, :, -1]
