"""Triton: K and V of a step's tokens into their slots."""

from __future__ import annotations

import triton
import triton.language as tl


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
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    PROGRAM_HEADS: tl.constexpr,
):
    """Program (t, h) writes token t for heads ``h * PROGRAM_HEADS`` on; LANES is WIDTH up to a power of two."""
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < SLOTS):
        head = tl.program_id(1) * PROGRAM_HEADS + tl.arange(0, PROGRAM_HEADS)
        lane = tl.arange(0, LANES)
        given = (token.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + lane[None, :]
        head_stride: tl.constexpr = 2 * WIDTH * BLOCK_SIZE
        row = (slot // BLOCK_SIZE).to(tl.int64) * BLOCK_STRIDE + slot % BLOCK_SIZE * 128
        row += tl.load(layer).to(tl.int64) * (HEADS * head_stride)
        place = view + row + head[:, None] * head_stride
        place += (lane // 128 * (BLOCK_SIZE * 128) + lane % 128)[None, :]
        values_at: tl.constexpr = 64 if WIDTH == 64 else WIDTH * BLOCK_SIZE
        inside = (head < HEADS)[:, None] & (lane < HEAD_DIM)[None, :]
        written = (head < HEADS)[:, None] & (lane < WIDTH)[None, :]
        dtype: tl.constexpr = view.dtype.element_ty
        tl.store(place, tl.load(k + given, mask=inside, other=0.0).to(dtype), mask=written)
        tl.store(place + values_at, tl.load(v + given, mask=inside, other=0.0).to(dtype), mask=written)
