"""Reads and writes KV of one byte a value in Triton, as `pallas_kernels.kv_codes` lays it out.

Bytes of float8 are packed and unpacked by integer operations: GPUs below sm_89 have no instruction for it. Where they
have, the pointer is one to float8, whose values are converted like any float's.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_rows(
    row,
    scales,
    known,
    dtype: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Read lanes FIRST to ``FIRST + WIDTH`` of some keys' K and V, [keys, WIDTH] of `dtype`; 0 where not `known`.

    Args:
        row: [keys] pointers to the keys' rows of the first tile.
        scales: [keys] pointers to the scales of these rows; only read if the view is int8.
    """
    lane = FIRST + tl.arange(0, WIDTH)
    at = lane // 128 * (BLOCK_ROWS * 128) + lane % 128
    raw = tl.load(row[:, None] + at[None, :], mask=known[:, None], other=0.0)
    if raw.dtype == tl.uint8:
        values = float8_values(raw)
    elif raw.dtype == tl.int8:
        values = raw.to(tl.float32) * half_row_scale(scales, known, FIRST // 64, BLOCK_ROWS)[:, None]
        for half in tl.static_range(1, WIDTH // 64):
            scale = half_row_scale(scales, known, FIRST // 64 + half, BLOCK_ROWS)[:, None]
            values = tl.where((lane // 64 == FIRST // 64 + half)[None, :], raw.to(tl.float32) * scale, values)
    else:
        values = raw
    return values.to(dtype)


@triton.jit
def half_row_scale(scales, known, HALF: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return the float32 scales, [keys], of the 64 lanes from ``64 * HALF`` on; `scales` as `read_rows` has them."""
    # Both scales of a row in one read of 4 bytes, the least that is copied ahead of its use.
    words = (scales + HALF // 2 * (BLOCK_ROWS * 128)).to(tl.pointer_type(tl.int32))
    word = tl.load(words, mask=known, other=0)
    return (word >> (HALF % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def float8_values(bits):
    """Return the float32 values of float8_e4m3fn given as uint8, but that NaN becomes 480."""
    wide = bits.to(tl.int8, bitcast=True).to(tl.int32) << 20  # sign, exponent, mantissa: where float32 has theirs
    return (wide & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120, the biases' difference


@triton.jit
def float8_bits(x):
    """Return the uint8 bits of float32 `x` as float8_e4m3fn: rounded to nearest, ties to even; saturated; NaN stays
    NaN."""
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 codes are 2**-9 apart, as are float32 numbers above 2**14.
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(tl.abs(x) < 0.015625, subnormal, normal), 0x7E)
    code = tl.where(x == x, code, 0x7F)
    return (code | (x.to(tl.int32, bitcast=True) >> 24 & 0x80)).to(tl.uint8)


@triton.jit
def int8_codes(x):
    """Return the codes of [rows, halves, 64] float32 `x`, and their float16 scales [rows, halves]; see
    `kv_codes.encode`."""
    scales = tl.div_rn(tl.max(tl.abs(x), 2), 127.0).to(tl.float16)
    wide = scales.to(tl.float32)
    steps = tl.div_rn(x, tl.where(wide == 0, 1.0, wide)[:, :, None])
    rounded = (steps + 12582912.0) - 12582912.0  # to the nearest integer, ties to even
    return tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8), scales
