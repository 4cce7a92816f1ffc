"""Implements kv_write as one Triton kernel, in place: a program writes the K and V of one token for some heads.

Memory. The view stays in global memory and is donated: the kernel stores through the input's pointer. A program loads
its rows of K and of V, [PROGRAM_HEADS, LANES] each, into registers and stores them to the token's place in its block:
as they are, as the bits of float8, or as int8 codes with a float16 scale for every 64 lanes. LANES is WIDTH up to a
power of two. Nothing goes through shared memory, except for the scales' maxima.

Loops. There are none: the grid is (tokens, heads / PROGRAM_HEADS). Slots are distinct, so programs write to different
places and wait for nothing. A token whose slot is outside the view is dropped.
"""

from __future__ import annotations

import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu_codes import float8_bits, int8_codes
from pallas_kernels.gpu_launch import Launch, Launcher, like, triton_call
from pallas_kernels.kv_codes import has_scales, tokens_of
from pallas_kernels.layout import padded_head_dim


@triton.jit
def write_tokens(
    slots,
    layer,
    k,
    v,
    view,
    view_again,
    SLOTS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    PROGRAM_HEADS: tl.constexpr,
):
    """Write tokens into a view of floats, or of the bits of float8."""
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < SLOTS):
        head = tl.program_id(1) * PROGRAM_HEADS + tl.arange(0, PROGRAM_HEADS)
        lane = tl.arange(0, LANES)
        given = (token.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + lane[None, :]
        head_stride: tl.constexpr = 2 * WIDTH * BLOCK_ROWS
        row = (slot // BLOCK_SIZE).to(tl.int64) * BLOCK_STRIDE + slot % BLOCK_SIZE * 128
        row += tl.load(layer).to(tl.int64) * (HEADS * head_stride)
        place = view + row + head[:, None] * head_stride
        place += (lane // 128 * (BLOCK_ROWS * 128) + lane % 128)[None, :]
        values_at: tl.constexpr = 64 if WIDTH == 64 else WIDTH * BLOCK_ROWS
        inside = (head < HEADS)[:, None] & (lane < HEAD_DIM)[None, :]
        written = (head < HEADS)[:, None] & (lane < WIDTH)[None, :]
        dtype: tl.constexpr = view.dtype.element_ty
        tl.store(place, stored(tl.load(k + given, mask=inside, other=0.0), dtype), mask=written)
        tl.store(place + values_at, stored(tl.load(v + given, mask=inside, other=0.0), dtype), mask=written)


@triton.jit
def stored(x, dtype: tl.constexpr):
    """Return `x` as a view of `dtype` without scales holds it."""
    return float8_bits(x.to(tl.float32)) if dtype == tl.uint8 else x.to(dtype)


@triton.jit
def write_codes(
    slots,
    layer,
    k,
    v,
    view,
    view_again,
    SLOTS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    PROGRAM_HEADS: tl.constexpr,
):
    """Write tokens into a view of int8 codes and their scales."""
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < SLOTS):
        head = tl.program_id(1) * PROGRAM_HEADS + tl.arange(0, PROGRAM_HEADS)
        half = tl.arange(0, LANES // 64)
        lane = half[:, None] * 64 + tl.arange(0, 64)[None, :]
        given = (token.to(tl.int64) * HEADS + head)[:, None, None] * HEAD_DIM + lane[None, :, :]
        inside = (head < HEADS)[:, None, None] & (lane < HEAD_DIM)[None, :, :]
        written = (head < HEADS)[:, None] & (half * 64 < WIDTH)[None, :]
        head_stride: tl.constexpr = 2 * WIDTH * BLOCK_ROWS
        home = view + (slot // BLOCK_SIZE).to(tl.int64) * BLOCK_STRIDE
        home += tl.load(layer).to(tl.int64) * (HEADS * head_stride)
        heads = home + head[:, None] * head_stride
        offset = slot % BLOCK_SIZE
        write_halves(tl.load(k + given, mask=inside, other=0.0), heads, half, offset, written, BLOCK_SIZE, BLOCK_ROWS)
        half += WIDTH // 64
        write_halves(tl.load(v + given, mask=inside, other=0.0), heads, half, offset, written, BLOCK_SIZE, BLOCK_ROWS)


@triton.jit
def write_halves(x, heads, half, offset, written, BLOCK_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Write codes and scales of a token's half rows `half`: x is [heads, halves, 64], `written` [heads, halves]."""
    codes, scales = int8_codes(x.to(tl.float32))
    tile = heads + (half // 2 * (BLOCK_ROWS * 128))[None, :]
    place = tile + offset * 128 + (half % 2 * 64)[None, :]
    tl.store(place[:, :, None] + tl.arange(0, 64)[None, None, :], codes, mask=written[:, :, None])
    scale_place = tile + BLOCK_SIZE * 128 + offset * 4 + (half % 2 * 2)[None, :]
    tl.store(scale_place.to(tl.pointer_type(tl.float16)), scales, mask=written)


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
