"""Reads KV of one byte a value in the TPU kernel: codes become numbers in VMEM, scales multiply scores and weights.

The halves of a row of lanes have a scale each (`pallas_kernels.kv_codes`), and a scale belongs to a key, as a column of
the scores does. So every query comes twice, once with each half of its lanes and zeros for the other: the products of
both rows, each times its half's scales, add up to the scores. The weights of the first row times the scales of V's
first half give the first half of the output's lanes, and so for the second. No row of codes is ever multiplied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_codes import TPU_TILE, has_scales, tokens_of
from pallas_kernels.layout import LANES

_F16_MANTISSA, _F32_MANTISSA = 10, 23
_BIAS = 127 - 15
"""Difference of the exponent biases of float32 and float16."""


class Tile(NamedTuple):
    """Holds 128 lanes of the K or V of some keys.

    Attributes:
        rows: [heads, keys, 128], numbers, or int8 codes as numbers without their scales.
        scales: float32 [heads, 1, keys], of the first and the second half of the lanes; None = all 1.
    """

    rows: Any
    scales: tuple[Any, Any] | None

    def only(self, start: Any, stop: Any) -> Tile:
        """Return the tile with zeros for keys before `start` and from `stop` on."""

        def keep(x, axis):
            key = lax.broadcasted_iota(jnp.int32, x.shape[1:], axis)
            return jnp.where((key >= start) & (key < stop), x, 0).astype(x.dtype)

        return Tile(keep(self.rows, 0), self.scales and (keep(self.scales[0], 1), keep(self.scales[1], 1)))


def load_tile(buffers: Any, at: Any, first: Any, pages: int, tile: int, dtype: jnp.dtype) -> Tile:
    """Load a tile of `pages` pages from page `first` on, in one buffer of the ring.

    Args:
        buffers: VMEM [depth, step_pages, heads, tiles, rows, 128].
        dtype: dtype of the numbers that codes become.
    """
    heads, size = buffers.shape[2], tokens_of(buffers)
    span = pl.ds(first, pages)
    rows = buffers[at, span, :, tile, pl.ds(0, size)].swapaxes(0, 1).reshape(heads, pages * size, LANES)
    if rows.dtype.itemsize > 1:
        return Tile(rows, None)
    if not has_scales(rows.dtype):
        return Tile(lax.bitcast_convert_type(rows, jnp.float8_e4m3fn).astype(dtype), None)
    words = pltpu.bitcast(buffers[at, span, :, tile, pl.ds(size, TPU_TILE)], jnp.int32)
    words = _in_order([words[page, :, :1] for page in range(pages)], size)
    return Tile(rows.astype(dtype), (_float16(words & 0xFFFF), _float16(lax.shift_right_logical(words, 16))))


def _in_order(words: list[Int[Array, "heads 1 128"]], size: int) -> Int[Array, "heads 1 keys"]:
    """Return the words of consecutive pages, of which the first `size` lanes count, side by side."""
    # A page's words fill only its first `size` lanes. Rotate each page to its place, and select, until 128 are full.
    lane = lax.broadcasted_iota(jnp.int32, words[0].shape, 2)
    rows = []
    for start in range(0, len(words), LANES // size):
        row, *others = words[start : start + LANES // size]
        for i, other in enumerate(others, 1):
            row = jnp.where(lane >= i * size, pltpu.roll(other, i * size, 2), row)
        rows.append(row)
    return jnp.concatenate(rows, axis=2)


def _float16(bits: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the float32 that the bits of a float16, zero or positive, stand for."""
    # Move the mantissa and exponent to float32's places and correct the bias; subnormals count units of 2**-24.
    shifted = bits << (_F32_MANTISSA - _F16_MANTISSA)
    normal = lax.bitcast_convert_type(shifted + (_BIAS << _F32_MANTISSA), jnp.float32)
    return jnp.where(bits < 1 << _F16_MANTISSA, bits.astype(jnp.float32) * 2.0**-24, normal)


def in_halves(q: Float[Array, "*batch rows lanes"]) -> Float[Array, "*batch 2*rows lanes"]:
    """Return all queries with the second half of each 128 lanes zero, then all with the first half zero."""
    first = _first_half(q)
    return jnp.concatenate([jnp.where(first, q, 0), jnp.where(first, 0, q)], axis=-2)


def of_halves(out: Float[Array, "*batch 2*rows lanes"]) -> Float[Array, "*batch rows lanes"]:
    """Join the first half of each 128 lanes of the first rows with the second half of the others' lanes."""
    first, second = jnp.split(out, 2, axis=-2)
    return jnp.where(_first_half(first), first, second)


def _first_half(rows: Float[Array, "*batch rows lanes"]) -> Array:
    return lax.broadcasted_iota(jnp.int32, (1, rows.shape[-1]), 1) % LANES < LANES // 2


def of_row(scales: tuple[Any, Any], rows: int) -> Float[Array, "heads rows keys"]:
    """Return each row's scale of each key: the first half's for the first rows."""
    row = lax.broadcasted_iota(jnp.int32, (1, rows, 1), 1)
    return jnp.where(row < rows // 2, scales[0], scales[1])


def add_halves(scores: Float[Array, "heads rows keys"]) -> Float[Array, "heads rows keys"]:
    """Add up both rows of a query; returns the sum in both."""
    first, second = jnp.split(scores, 2, axis=1)
    return scores + jnp.concatenate([second, first], axis=1)
