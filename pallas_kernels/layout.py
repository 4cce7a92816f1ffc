"""How a layer group's KV memory lies in an array: the one fact all kernels share.

A view is ``[blocks, layers, kv_heads, tiles, block_size, 128]``: page-major (a block holds all layers of its
group), 128 lanes because wider minor dimensions made the TPU compiler copy the whole pool.

- head_dim <= 64 (padded to 64): K and V side by side in one row, lanes 0-63 K and 64-127 V; ``tiles == 1``.
- head_dim > 64 (padded to a multiple of 128): ``tiles == 2 * ceil(head_dim / 128)``; K's lane tiles, then V's.

Padding lanes hold zeros.
"""

from __future__ import annotations

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
    blocks: int, layers: int, kv_heads: int, head_dim: int, block_size: int
) -> tuple[int, int, int, int, int, int]:
    """Shape of a group's view; its product is the group's share of the pool in elements."""
    return (blocks, layers, kv_heads, num_tiles(head_dim), block_size, LANES)
