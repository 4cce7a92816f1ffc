"""Implements block_copy in plain jnp."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def block_copy(
    blocks: Shaped[Array, "blocks ..."], src: Int[Array, " pairs"], dst: Int[Array, " pairs"]
) -> Shaped[Array, "blocks ..."]:
    """See `pallas_kernels.block_copy.block_copy`."""
    n = blocks.shape[0]
    in_range = (src >= 0) & (src < n) & (dst >= 0) & (dst < n)
    read = blocks[jnp.where(in_range, src, 0)]
    return blocks.at[jnp.where(in_range, dst, n)].set(read, mode="drop")
