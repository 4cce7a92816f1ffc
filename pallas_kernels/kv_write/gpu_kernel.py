"""Writes K and V of a step's tokens into their slots, as values or as codes with scales, in Triton.

Program (t, h) of either kernel writes token t for heads ``h * PROGRAM_HEADS`` on; LANES is WIDTH up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.gpu_codes import float8_bits, int8_codes


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
