"""Says how a layer group's KV memory lies in an array: the one fact all kernels share.

A view is ``[blocks, layers, kv_heads, tiles, block_size, 128]``: page-major (a block holds all layers of its
group), 128 lanes because wider minor dimensions made the TPU compiler copy the whole pool.

- head_dim <= 64 (padded to 64): K and V side by side in one row, lanes 0-63 K and 64-127 V; ``tiles == 1``.
- head_dim > 64 (padded to a multiple of 128): ``tiles == 2 * ceil(head_dim / 128)``; K's tiles, then V's.

A view of latents (DeepSeek-V2's attention) holds one row a token, which is key and value at once, for a single head:
``tiles == ceil(width / 128)``, and a value is the first lanes of its key.

Padding lanes hold zeros.

An int8 view has more rows than tokens: see `pallas_kernels.kv_codes`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.kv_codes import block_rows

LANES = 128


def padded_head_dim(head_dim: int) -> int:
    """Return how many lanes one head's K (or V) takes in the view."""
    if head_dim < 1:
        raise ValueError(f"head_dim={head_dim} must be positive")
    return 64 if head_dim <= 64 else -(-head_dim // LANES) * LANES


def num_tiles(head_dim: int) -> int:
    """Return how many 128-lane tiles K and V of one token and head take together."""
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
    """Return the shape of a group's view, whose product is the group's share of the pool in elements. `tile`: see
    `block_rows`."""
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
    """Return each token's K and V as the rows that a view holds, padding lanes zero."""
    tokens, kv_heads, head_dim = k.shape
    if head_dim % LANES == 0:  # so put together, neighbours of one array are found to be one part of it
        return jnp.stack([k, v], axis=2).reshape(tokens, kv_heads, num_tiles(head_dim), LANES)
    lanes = ((0, 0), (0, 0), (0, padded_head_dim(head_dim) - head_dim))
    rows = jnp.concatenate([jnp.pad(k, lanes), jnp.pad(v, lanes)], axis=-1)
    return rows.reshape(tokens, kv_heads, num_tiles(head_dim), LANES)


def unpack_kv(
    rows: Float[Array, "*batch tiles 128"], head_dim: int
) -> tuple[Float[Array, "*batch head_dim"], Float[Array, "*batch head_dim"]]:
    """Return K and V of rows with any leading axes, the inverse of `pack_kv`."""
    flat = rows.reshape(*rows.shape[:-2], -1)
    start_of_v = padded_head_dim(head_dim)
    return flat[..., :head_dim], flat[..., start_of_v : start_of_v + head_dim]


def latent_tiles(width: int) -> int:
    """Return how many 128-lane tiles one token's latent, `width` lanes, takes in a view of latents."""
    if width < 1:
        raise ValueError(f"width={width} must be positive")
    return -(-width // LANES)


def latent_view_shape(
    blocks: int, layers: int, width: int, block_size: int, dtype: DTypeLike = jnp.float32, tile: int = 1
) -> tuple[int, int, int, int, int, int]:
    """Return the shape of a view of latents, see `view_shape`."""
    return (blocks, layers, 1, latent_tiles(width), block_rows(block_size, dtype, tile), LANES)


def check_latent_view(view: jax.Array, width: int) -> None:
    """Raise ValueError unless `view` can hold latents of this width."""
    want = (1, latent_tiles(width), LANES)
    if view.ndim != 6 or (view.shape[2], view.shape[3], view.shape[5]) != want:
        raise ValueError(
            f"view of shape {view.shape} does not hold latents of {width} lanes: want "
            f"[blocks, layers, 1, {want[1]}, block_size, {want[2]}]"
        )


def pack_latents(rows: Float[Array, "tokens width"]) -> Float[Array, "tokens 1 tiles 128"]:
    """Return each token's latent as the rows that a view holds, padding lanes zero."""
    tokens, width = rows.shape
    tiles = latent_tiles(width)
    return jnp.pad(rows, ((0, 0), (0, tiles * LANES - width))).reshape(tokens, 1, tiles, LANES)


class KVTiles(NamedTuple):
    """Says where a view's rows hold keys and values.

    Attributes:
        keys, values: tiles that hold them.
        lanes: lanes of a tile that are a key's; where that is half of them, the other half is the value's.
    """

    keys: range
    values: range
    lanes: int

    @classmethod
    def of(cls, tiles: int, value_dim: int | None) -> KVTiles:
        """Return the layout of a view with this many tiles; of latents, if `value_dim` gives the width of their
        values."""
        if value_dim is not None:
            return cls(range(tiles), range(latent_tiles(value_dim)), LANES)
        if tiles == 1:
            return cls(range(1), range(1), LANES // 2)
        return cls(range(tiles // 2), range(tiles // 2, tiles), LANES)

    @property
    def is_packed(self) -> bool:
        """Tell whether key and value lie side by side in one row."""
        return self.lanes < LANES

    @property
    def key_width(self) -> int:
        """Return how many lanes a key has, with padding."""
        return len(self.keys) * self.lanes

    @property
    def value_width(self) -> int:
        """Return how many lanes a value has, with padding."""
        return len(self.values) * self.lanes
