"""Takes a layer's joined Q, K and V apart and rotates queries and keys (RoFormer, Su et al., 2021), in one launch.

`rotated_heads` picks `reference` (plain jnp) or `gpu` (Triton). XLA makes three kernels of it on a GPU: one for
queries, one for keys, and a copy of the values, as a kernel that is called takes its operands whole.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from jaxtyping import Array, DTypeLike, Float

from pallas_kernels.gpu_launch import multiplies
from pallas_kernels.rotated_heads import reference

__all__ = ["RotatedHeads", "rotated_heads", "takes"]

RotatedHeads: TypeAlias = tuple[
    Float[Array, "tokens kv_heads q_per_kv head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
]
"""Queries, keys and values."""


def rotated_heads(
    joined: Float[Array, "tokens kv_heads q_per_kv+2 head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    *,
    impl: Literal["reference", "gpu"],
) -> RotatedHeads:
    """Return queries and keys rotated by their token's angles, and values as they are, each in an array of its own.

    Each pair (i, i + half) of a head is turned, and what follows the pairs stays; computed in float32.

    Args:
        joined: for each KV head its queries, its key and its value.
        cos, sin: of the angles, float32; ``2 * half`` is at most head_dim.

    Raises:
        ValueError: there are fewer than three rows a KV head, or more pairs than fit in a head.
    """
    rows, head_dim = joined.shape[2:]
    if rows < 3:
        raise ValueError(f"joined has {rows} rows a KV head; queries, a key and a value are three or more")
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(f"{cos.shape[1]} pairs are more than a head of {head_dim} has")
    if impl == "reference":
        return reference.rotated_heads(joined, cos, sin)
    from pallas_kernels.rotated_heads import gpu  # imports triton, which only a GPU's environment has

    return gpu.rotated_heads(joined, cos, sin)


def takes(dtype: DTypeLike) -> bool:
    """Tell whether the Triton kernel takes heads of this dtype on the GPU that is compiled for."""
    return multiplies(dtype)
