"""Takes a layer's joined Q, K and V apart and rotates queries and keys (RoFormer, Su et al., 2021), in one launch.

`rotated_heads` picks `reference` (plain jnp), `gpu` (Triton), `tpu` (Mosaic) or `cpu` (Numba). XLA makes three kernels
of it on a GPU: one for queries, one for keys, and a copy of the values, as a kernel that is called takes its operands
whole. On a TPU it makes five operations, on a CPU several passes, mostly on one core. Norms of queries and keys, which
some models have, are computed on the way.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from pallas_kernels.gpu_launch import multiplies
from pallas_kernels.platform import Impl
from pallas_kernels.rotated_heads import reference, tpu
from pallas_kernels.rotated_heads.reference import HeadNorms

__all__ = ["HeadNorms", "RotatedHeads", "rotated_heads", "takes"]

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
    norms: HeadNorms | None = None,
    *,
    impl: Impl | Literal["reference"],
) -> RotatedHeads:
    """Return queries and keys rotated by their token's angles, and values unchanged, in three separate arrays.

    Each pair (i, i + half) of a head is turned, and what follows the pairs stays; computed in float32.

    Args:
        joined: for each KV head its queries, its key and its value.
        cos, sin: of the angles, float32; ``2 * half`` is at most head_dim.
        norms: of queries and keys, before they are rotated.
        impl: ``cpu`` needs compiled loops; all but the reference need what `takes` names, and unsharded operands.

    Raises:
        ValueError: `impl` is none of these, there are fewer than three rows a KV head, more pairs than fit in a head,
            or the heads are not such as a TPU's kernel takes.
    """
    rows, head_dim = joined.shape[2:]
    if rows < 3:
        raise ValueError(f"joined has {rows} rows a KV head; queries, a key and a value are three or more")
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(f"{cos.shape[1]} pairs are more than a head of {head_dim} has")
    if impl == "reference":
        return reference.rotated_heads(joined, cos, sin, norms)
    if impl == "cpu":
        from pallas_kernels.rotated_heads import cpu

        return cpu.rotated_heads(joined, cos, sin, norms)
    if impl in ("tpu", "tpu_interpret"):
        return tpu.rotated_heads(joined, cos, sin, norms, interpret=impl == "tpu_interpret")
    if impl != "gpu":
        raise ValueError(f"impl={impl!r} is not 'reference', 'cpu', 'tpu', 'tpu_interpret' or 'gpu'")
    from pallas_kernels.rotated_heads import gpu  # imports triton, which only a GPU's environment has

    return gpu.rotated_heads(joined, cos, sin, norms)


def takes(dtype: DTypeLike, impl: Impl, *, shape: tuple[int, ...] | None = None, half: int = 0) -> bool:
    """Tell whether `impl` has heads of this dtype, on the GPU that is compiled for where it is ``gpu``.

    Args:
        shape: of the joined heads; a TPU's kernel takes them only if `shape` is given.
        half: pairs of a head; given together with `shape`.
    """
    if impl in ("tpu", "tpu_interpret"):
        return shape is not None and jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32) and tpu.takes(shape, half)
    return multiplies(dtype) if impl == "gpu" else impl == "cpu" and jnp.dtype(dtype) == jnp.float32
