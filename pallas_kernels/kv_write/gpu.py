"""Implements kv_write as one Triton kernel, in place: a program writes the K and V of one token for some heads."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu_launch import Launch, Launcher, like, triton_call
from pallas_kernels.kv_codes import has_scales, tokens_of
from pallas_kernels.kv_write.gpu_kernel import write_codes, write_tokens
from pallas_kernels.layout import padded_head_dim

PROGRAM_LANES = 2048
"""Lanes of K that a program writes: 16 a thread."""


def kv_write(
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int[Array, " tokens"],
    *,
    launch: Launcher = triton_call,
) -> Float[Array, "blocks layers kv_heads tiles block_size 128"]:
    """See `pallas_kernels.kv_write.kv_write`. `view` is aliased to the result."""
    blocks, _, kv_heads, _, block_rows, _ = view.shape
    block_size = tokens_of(view)
    tokens, _, head_dim = k.shape
    lanes = 1 << (padded_head_dim(head_dim) - 1).bit_length()
    heads = min(max(1, PROGRAM_LANES // lanes), 1 << (kv_heads - 1).bit_length())
    write = Launch(
        write_codes if has_scales(view.dtype) else write_tokens,
        grid=(tokens, -(-kv_heads // heads)),
        out=(like(view),),
        aliases={4: 0},
        constants={
            "SLOTS": blocks * block_size,
            "BLOCK_STRIDE": view.size // blocks,
            "BLOCK_SIZE": block_size,
            "BLOCK_ROWS": block_rows,
            "HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "WIDTH": padded_head_dim(head_dim),
            "LANES": lanes,
            "PROGRAM_HEADS": heads,
        },
        num_warps=4,
    )
    (view,) = launch(write, slots.astype(jnp.int32), jnp.asarray(layer, jnp.int32)[None], k, v, view)
    return view
