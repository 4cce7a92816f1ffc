"""Implements rotated_heads in plain jnp: the version that says what is right."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.rotated_heads.norms import HeadNorms
from pallas_kernels.row_ops import rms_norm


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
