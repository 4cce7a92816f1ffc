"""Implements kv_write in plain jnp."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_codes import encode, has_scales, scale_places, stored, tokens_of


def write_rows(
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    rows: Float[Array, "tokens kv_heads tiles 128"],
    slots: Int[Array, " tokens"],
) -> Float[Array, "blocks layers kv_heads tiles block_size 128"]:
    """See `pallas_kernels.kv_write.write_rows`."""
    blocks, block_size = view.shape[0], tokens_of(view)
    in_range = (slots >= 0) & (slots < blocks * block_size)
    block = jnp.where(in_range, slots // block_size, blocks)  # JAX wraps negative indices: drop them here
    offset = slots % block_size
    if has_scales(view.dtype):
        rows, scales = encode(rows)
        row, lanes = scale_places(offset, view.shape[4], block_size)
        scales = jnp.moveaxis(scales, -1, 1)
        view = view.at[block[:, None], layer, :, :, row, lanes].set(scales, mode="drop")
    return view.at[block, layer, :, :, offset, :].set(stored(rows, view.dtype), mode="drop")
