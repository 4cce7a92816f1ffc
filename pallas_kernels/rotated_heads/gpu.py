"""Implements rotated_heads as one Triton kernel: a program has the rows of one token and one KV head."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from pallas_kernels.gpu_launch import Launch, Launcher, triton_call
from pallas_kernels.rotated_heads.gpu_kernel import rotate_heads
from pallas_kernels.rotated_heads.norms import HeadNorms


def rotated_heads(
    joined: Float[Array, "tokens kv_heads rows head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    norms: HeadNorms | None = None,
    *,
    launch: Launcher = triton_call,
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.rotated_heads.rotated_heads`."""
    tokens, kv_heads, rows, head_dim = joined.shape
    one = jax.ShapeDtypeStruct((tokens, kv_heads, head_dim), joined.dtype)
    rotation = Launch(
        rotate_heads,
        grid=(tokens, kv_heads),
        out=(jax.ShapeDtypeStruct((tokens, kv_heads, rows - 2, head_dim), joined.dtype), one, one),
        constants={
            "HEADS": kv_heads,
            "GROUP": rows - 2,
            "HEAD_DIM": head_dim,
            "HALF": cos.shape[1],
            "ROWS": 1 << (rows - 1).bit_length(),
            "LANES": 1 << (head_dim - 1).bit_length(),
            "NORMED": norms is not None,
            "EPS": 0.0 if norms is None else norms.eps,
        },
        num_warps=4,
    )
    q, k, v = launch(rotation, joined, cos, sin, cos if norms is None else norms.factors)
    return q, k, v
