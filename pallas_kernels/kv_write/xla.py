"""kv_write for any XLA backend: one row of lanes a token, updated in place.

A dropped token writes back what its row held. A scatter would do the same with less code, but XLA:CPU turns the
scatter of a single token into a select over the whole view, which copies the pool.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
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
    blocks, layers, kv_heads, tiles, block_size, lanes = view.shape
    in_range = (slots >= 0) & (slots < blocks * block_size)
    slots = jnp.where(in_range, slots, 0)
    block, offset = slots // block_size, slots % block_size
    rows = pack_kv(k, v).astype(view.dtype).reshape(-1, kv_heads * tiles, lanes)
    # Dimensions of size one would let XLA choose a layout that it then has to copy the pool for.
    heads = (kv_heads * tiles,) if kv_heads * tiles > 1 else ()
    flat = (blocks * layers, *heads, block_size, lanes)
    first = block * layers + jnp.asarray(layer, jnp.int32)

    def write(token: Int[Array, ""], pool: Array) -> Array:
        zero = jnp.int32(0)
        at = (first[token], *(zero for _ in heads), offset[token], zero)
        old = lax.dynamic_slice(pool, at, (1, *heads, 1, lanes))
        new = jnp.where(in_range[token], rows[token].reshape(old.shape), old)
        return lax.dynamic_update_slice(pool, new, at)

    # Padding comes last, so the loop ends with the last token that is kept. A trip count that XLA does not know
    # also keeps it from unrolling the loop of a one-token step, where it would then copy the pool.
    count = jnp.max(jnp.where(in_range, jnp.arange(1, len(slots) + 1), 0), initial=0)
    return lax.fori_loop(0, count, write, view.reshape(flat)).reshape(view.shape)
