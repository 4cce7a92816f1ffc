"""Holds KV in one byte a value: float8 without scales, int8 with a scale for every 64 lanes of a token's row.

A view of uint8 holds the bits of float8_e4m3fn: XLA:CPU would convert a whole float8 pool to write a row of it. For the
same reason a CPU's view of bfloat16 may be one of its bits, uint16.

Scales belong to a token, not to a block: a token that is appended to a block may be larger than all before it, and
with one scale a block, every token of the block would have to be read, rescaled and written again. They are float16
and lie in rows of the same block, after its tokens' rows, so that whatever moves a block moves its scales: four bytes
a row of 128 lanes, a row of scales for 32 rows of codes.

On TPUs a block is whole memory tiles of eight rows (`TPU_TILE`), and the bytes of a token's scales lie in one lane of
four rows: the kernel reads them as one 32-bit word per lane, like the keys' scores.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8, Shaped

_LANES = 128
_HALF = 64
_SUBLANES = 8
SCALE_BYTES = 4
"""Bytes of one row's scales, two float16 numbers."""
TPU_TILE = 8
"""Rows of which a block of codes on a TPU is a multiple: the pool could not be viewed as blocks without a copy."""


def has_scales(dtype: DTypeLike) -> bool:
    """Tell whether a view of this dtype holds rows of scales."""
    return jnp.dtype(dtype) == jnp.int8


def block_rows(block_size: int, dtype: DTypeLike, tile: int = 1) -> int:
    """Return how many rows a block of `block_size` tokens has in a view of `dtype`, with scales a multiple of `tile`, 1
    or `TPU_TILE`.

    Raises:
        ValueError: when a block with scales is not a multiple of eight tokens.
    """
    if not has_scales(dtype):
        return block_size
    if block_size % _SUBLANES:
        raise ValueError(f"block_size={block_size} is not a multiple of {_SUBLANES}, as blocks with scales are")
    return -(-(block_size + -(-block_size * SCALE_BYTES // _LANES)) // tile) * tile


def tokens_of(view: Shaped[Array, "*batch rows 128"]) -> int:
    """Return how many tokens a block of this view holds, the inverse of `block_rows` with either tile."""
    rows = view.shape[-2]
    return (rows - -(-rows // (_LANES // SCALE_BYTES + 1))) // _SUBLANES * _SUBLANES if has_scales(view.dtype) else rows


def scales_in_lanes(block_rows: int) -> bool:
    """Tell whether a token's scales lie in one lane of four rows of a block of so many rows; else in four lanes of a
    row.

    They do in blocks of whole tiles of up to 128 tokens, a lane each.
    """
    return block_rows % TPU_TILE == 0 and block_rows <= _LANES + TPU_TILE


def check_kernel(view: Shaped[Array, "*batch rows 128"], impl: str) -> None:
    """Raise ValueError where the implementation does not read blocks such as this view's; TPUs' do that themselves."""
    if impl == "gpu" and has_scales(view.dtype) and scales_in_lanes(view.shape[-2]):
        raise ValueError(
            f"blocks of {view.shape[-2]} rows of int8 are as TPUs hold them, which impl='gpu' does not read"
        )


def check_tpu_block(block_size: int, dtype: DTypeLike) -> None:
    """Raise ValueError unless the TPU kernels can read and write blocks of this many tokens."""
    whole = 32 // jnp.dtype(dtype).itemsize
    if block_size % whole:
        raise ValueError(
            f"block_size={block_size} is not a multiple of {whole}, the tile of {jnp.dtype(dtype)} on TPUs"
        )
    if has_scales(dtype) and (block_size > _LANES or _LANES % block_size):
        raise ValueError(f"block_size={block_size} is not 32, 64 or 128, as blocks of int8 on TPUs are")


def check_tpu_view(view: Shaped[Array, "*batch rows 128"]) -> None:
    """Raise ValueError unless the TPU kernels can read and write blocks of this many tokens."""
    check_tpu_block(tokens_of(view), view.dtype)
    if has_scales(view.dtype) and not scales_in_lanes(view.shape[-2]):
        raise ValueError(f"blocks of {view.shape[-2]} rows of int8 are not whole tiles of {TPU_TILE}: see block_rows")


def stored(rows: Float[Array, "*shape"], dtype: DTypeLike) -> Shaped[Array, "*shape"]:
    """Return rows as a view without scales holds them; float8 saturates."""
    if jnp.dtype(dtype) == jnp.uint16:
        return jax.lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)
    if jnp.dtype(dtype) != jnp.uint8:
        return rows.astype(dtype)
    largest = float(jnp.finfo(jnp.float8_e4m3fn).max)
    return jax.lax.bitcast_convert_type(jnp.clip(rows, -largest, largest).astype(jnp.float8_e4m3fn), jnp.uint8)


def encode(
    rows: Float[Array, "*batch 128"],
) -> tuple[Int8[Array, "*batch 128"], Int8[Array, "*batch 4"]]:
    """Encode rows as int8 codes; returns them and the bytes of their two scales."""
    halves = rows.astype(jnp.float32).reshape(*rows.shape[:-1], 2, _HALF)
    scales = (jnp.abs(halves).max(axis=-1, keepdims=True) / 127).astype(jnp.float16)
    wide = scales.astype(jnp.float32)
    codes = jnp.clip(jnp.rint(halves / jnp.where(wide == 0, 1, wide)), -127, 127)
    packed = jax.lax.bitcast_convert_type(scales[..., 0], jnp.int8)
    return codes.astype(jnp.int8).reshape(rows.shape), packed.reshape(*rows.shape[:-1], SCALE_BYTES)


def decode(blocks: Shaped[Array, "*batch rows 128"]) -> Float[Array, "*batch block_size 128"]:
    """Decode blocks as they lie in a view to the float32 rows of their tokens."""
    if blocks.dtype == jnp.uint8:
        return jax.lax.bitcast_convert_type(blocks, jnp.float8_e4m3fn).astype(jnp.float32)
    if blocks.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(blocks, jnp.bfloat16).astype(jnp.float32)
    if not has_scales(blocks.dtype):
        return blocks.astype(jnp.float32)
    size, batch = tokens_of(blocks), blocks.shape[:-2]
    pairs = _scale_bytes(blocks, size).reshape(*batch, -1, 2)[..., : 2 * size, :]
    scales = jax.lax.bitcast_convert_type(pairs, jnp.float16).astype(jnp.float32).reshape(*batch, size, 2, 1)
    codes = blocks[..., :size, :].astype(jnp.float32).reshape(*batch, size, 2, _HALF)
    return (codes * scales).reshape(*batch, size, _LANES)


def _scale_bytes(blocks: Int8[Array, "*batch rows 128"], size: int) -> Int8[Array, "*batch ..."]:
    """Return the scales' bytes, token by token, with the bytes of a token contiguous."""
    rows = blocks[..., size:, :]
    return rows[..., :SCALE_BYTES, :].swapaxes(-1, -2) if scales_in_lanes(blocks.shape[-2]) else rows


def scale_strides(view: Shaped[Array, "*batch rows 128"]) -> tuple[int, int]:
    """Return the bytes between the scales of two tokens of a block and between two bytes of a token's; (0, 0) where
    there are none. The first one's lie at the beginning of the first row after the tokens'."""
    if not has_scales(view.dtype):
        return 0, 0
    return (1, _LANES) if scales_in_lanes(view.shape[-2]) else (SCALE_BYTES, 1)


def scale_places(
    offset: Int[Array, " tokens"], block_rows: int, block_size: int
) -> tuple[Int[Array, "tokens 4"], Int[Array, "tokens 4"]]:
    """Return (row, lane) of each byte of the scales of the token at `offset` in its block."""
    byte = jnp.arange(SCALE_BYTES)
    if scales_in_lanes(block_rows):
        row, lane = jnp.broadcast_arrays(block_size + byte, offset[:, None])
        return row, lane
    lane = (offset * SCALE_BYTES % _LANES)[:, None] + byte
    return jnp.broadcast_to((block_size + offset * SCALE_BYTES // _LANES)[:, None], lane.shape), lane
