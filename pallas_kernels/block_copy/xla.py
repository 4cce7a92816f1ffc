"""Implements block_copy for any XLA backend."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped


def block_copy(
    blocks: Shaped[Array, "blocks ..."], src: Int[Array, " pairs"], dst: Int[Array, " pairs"]
) -> Shaped[Array, "blocks ..."]:
    """See `pallas_kernels.block_copy.block_copy`."""
    n = blocks.shape[0]
    in_range = (src >= 0) & (src < n) & (dst >= 0) & (dst < n)
    # XLA:GPU would fuse the reads into the scatter, and then has to write it to a second pool.
    blocks, read = lax.optimization_barrier((blocks, blocks[jnp.where(in_range, src, 0)]))
    return blocks.at[jnp.where(in_range, dst, n)].set(read, mode="drop")
