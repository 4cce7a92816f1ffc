"""kv_write in plain jnp."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import pack_kv


def kv_write(
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int[Array, " tokens"],
) -> Float[Array, "blocks layers kv_heads tiles block_size 128"]:
    """See `pallas_kernels.kv_write.kv_write`."""
    blocks, _, _, _, block_size, _ = view.shape
    in_range = (slots >= 0) & (slots < blocks * block_size)
    block = jnp.where(in_range, slots // block_size, blocks)  # JAX wraps negative indices: drop them here
    rows = pack_kv(k, v).astype(view.dtype)
    return view.at[block, layer, :, :, slots % block_size, :].set(rows, mode="drop")
