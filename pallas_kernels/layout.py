"""How a layer group's KV memory lies in an array: the one fact all kernels share.

A view is ``[blocks, layers, kv_heads, tiles, block_size, 128]``: page-major (a block holds all layers of its
group), 128 lanes because wider minor dimensions made the TPU compiler copy the whole pool.

- head_dim <= 64 (padded to 64): K and V side by side in one row, lanes 0-63 K and 64-127 V; ``tiles == 1``.
- head_dim > 64 (padded to a multiple of 128): ``tiles == 2 * ceil(head_dim / 128)``; K's tiles, then V's.

Padding lanes hold zeros.

An int8 view has more rows than tokens: see `pallas_kernels.kv_codes`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.kv_codes import block_rows

LANES = 128


def padded_head_dim(head_dim: int) -> int:
    """Lanes one head's K (or V) takes in the view."""
    if head_dim < 1:
        raise ValueError(f"head_dim={head_dim} must be positive")
    return 64 if head_dim <= 64 else -(-head_dim // LANES) * LANES


def num_tiles(head_dim: int) -> int:
    """128-lane tiles that K and V of one token and head take together."""
    return 2 * padded_head_dim(head_dim) // LANES


def view_shape(
    blocks: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: DTypeLike = jnp.float32,
    tile: int = 1,
) -> tuple[int, int, int, int, int, int]:
    """Shape of a group's view; its product is the group's share of the pool in elements. `tile`: see `block_rows`."""
    return (blocks, layers, kv_heads, num_tiles(head_dim), block_rows(block_size, dtype, tile), LANES)


def check_view(view: jax.Array, kv_heads: int, head_dim: int) -> None:
    """Raise ValueError unless `view` can hold heads of this number and width."""
    want = (kv_heads, num_tiles(head_dim), LANES)
    if view.ndim != 6 or (view.shape[2], view.shape[3], view.shape[5]) != want:
        raise ValueError(
            f"view of shape {view.shape} does not hold kv_heads={kv_heads}, head_dim={head_dim}: want "
            f"[blocks, layers, {want[0]}, {want[1]}, block_size, {want[2]}]"
        )


def pack_kv(
    k: Float[Array, "tokens kv_heads head_dim"], v: Float[Array, "tokens kv_heads head_dim"]
) -> Float[Array, "tokens kv_heads tiles 128"]:
    """Each token's K and V as the rows that a view holds, padding lanes zero."""
    tokens, kv_heads, head_dim = k.shape
    lanes = ((0, 0), (0, 0), (0, padded_head_dim(head_dim) - head_dim))
    rows = jnp.concatenate([jnp.pad(k, lanes), jnp.pad(v, lanes)], axis=-1)
    return rows.reshape(tokens, kv_heads, num_tiles(head_dim), LANES)


def unpack_kv(
    rows: Float[Array, "*batch tiles 128"], head_dim: int
) -> tuple[Float[Array, "*batch head_dim"], Float[Array, "*batch head_dim"]]:
    """Inverse of `pack_kv` on rows with any leading axes."""
    flat = rows.reshape(*rows.shape[:-2], -1)
    start_of_v = padded_head_dim(head_dim)
    return flat[..., :head_dim], flat[..., start_of_v : start_of_v + head_dim]
