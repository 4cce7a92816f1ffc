"""Does the arithmetic of the TPU kernel: one span of keys is added to the online softmax of some queries.

It is FlashAttention-2 (arXiv 2307.08691, algorithm 1), with the sum of the weights kept per lane: lane l of
`total` sums the keys at positions l, l + 128, ... and the lanes are added up once, at the end. The maximum is the same
in all lanes, so nothing is broadcast from one lane to the others. Scores are in units of ``log 2``, as a TPU has an
instruction for powers of two and a power of e is one of them and a multiplication.

KV of one byte a value becomes numbers in VMEM, and its scales multiply scores and weights. The halves of a row of lanes
have a scale each (`pallas_kernels.kv_codes`), and a scale belongs to a key, as a column of the scores does. So every
query comes twice, once with each half of its lanes and zeros for the other: the products of both rows, each times its
half's scales, add up to the scores. The weights of the first row times the scales of V's first half give the first half
of the output's lanes, and so for the second. No row of codes is ever multiplied.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
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


@functools.partial(jax.jit, static_argnames=("pages", "tile", "dtype"))  # a step's spans are traced once
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


LOG2E = math.log2(math.e)
MASKED = -1e30
"""A finite stand-in for -inf: differences of two of them stay numbers."""


class _State(NamedTuple):
    """Holds the largest scores so far, the sums of weights, and the weighted values by tiles of lanes."""

    top: Any
    total: Any
    acc: Any


@dataclass(frozen=True)
class OnlineSoftmax:
    """Holds queries of some KV heads and the state of their softmax so far.

    Attributes:
        q: VMEM [heads, rows, lanes].
        top: VMEM float32 [heads, rows, 128], the largest score in units of log 2, the same in all lanes.
        total: VMEM float32 [heads, rows, 128], the sum of the weights of the keys of a lane.
        acc: VMEM float32 [heads, rows, value lanes], the weighted values.
        scale: multiplies the scores.
        soft_cap: see `pallas_kernels.paged_attention.paged_attention`.
        compute_dtype: dtype of the operands of matrix products.
        sinks: VMEM float32 [heads, rows, 128], one logit per row that has a weight but no value, in units of log 2 and
            the same in all lanes; None = none.
    """

    q: Any
    top: Any
    total: Any
    acc: Any
    scale: float
    soft_cap: float | None
    compute_dtype: Any
    sinks: Any = None

    def reset(self) -> None:
        """Begin with the sinks only."""
        self.top[...], self.total[...] = self.start()
        self.acc[...] = jnp.zeros(self.acc.shape, jnp.float32)

    def start(self) -> tuple[Any, Any]:
        """Return the maximum and the sum before any key: of the sinks, whose weight of one is counted in lane 0."""
        if self.sinks is None:
            return jnp.full(self.top.shape, MASKED, jnp.float32), jnp.zeros(self.total.shape, jnp.float32)
        lane = lax.broadcasted_iota(jnp.int32, self.total.shape, 2)
        return self.sinks[...], jnp.where(lane == 0, 1.0, 0.0)

    def add(self, keys, values, spans: int, seen=None, chains: int = 1) -> None:
        """Attend to some spans of keys, each a multiple of 128.

        Args:
            keys, values: span i as a list of tiles; called in order, all keys first.
            seen: bool [rows, keys of all spans]; None = all. Values that no row sees must be finite.
            chains: parts of the spans with a maximum each, whose sums are joined at the end: the exponentials of one
                are computed during the products of another.
        """
        # The loops over spans and tiles of lanes are unrolled, so that the compiler can overlap the products of one
        # span with the exponentials of another. All scores are live at once, [heads, rows, span] each.
        scores = [self.scores(keys(i)) for i in range(spans)]
        if seen is not None:
            width = scores[0].shape[2]
            scores = [jnp.where(seen[None, :, i * width : (i + 1) * width], s, MASKED) for i, s in enumerate(scores)]
        tiles = [self.acc[:, :, t : t + LANES] for t in range(0, self.acc.shape[2], LANES)]
        states = [_State(self.top[...], self.total[...], tiles)]
        cuts = [spans * part // chains for part in range(chains + 1)]
        for first, stop in itertools.pairwise(cuts):
            if first < stop:
                before = states.pop() if first == 0 else None
                states.append(self._after(before, scores[first:stop], values, first))
        top = functools.reduce(jnp.maximum, [state.top for state in states])
        total, acc = states[0].total, states[0].acc
        if len(states) > 1:
            fades = [jnp.exp2(state.top - top) for state in states]
            total = sum(fade * state.total for fade, state in zip(fades, states, strict=True))
            acc = [
                sum(fade * tile for fade, tile in zip(fades, each, strict=True))
                for each in zip(*(state.acc for state in states), strict=True)
            ]
        self.top[...] = top
        self.total[...] = total
        self.acc[...] = jnp.concatenate(acc, axis=2)

    def _after(self, before: _State | None, scores: list[Any], values: Any, first: int) -> _State:
        """Return the state after some spans from span `first` on; `before`: None = nothing was seen."""
        highest = [jnp.max(s, axis=2, keepdims=True) for s in scores]
        if before is None:
            top = jnp.broadcast_to(functools.reduce(jnp.maximum, highest), self.top.shape)
            total, acc = None, None
        else:
            # A row that has seen nothing yet keeps top == MASKED and adds ones here; its first real score wipes them.
            top = functools.reduce(jnp.maximum, highest, before.top)
            fade = jnp.exp2(before.top - top)
            total, acc = fade * before.total, [fade * tile for tile in before.acc]
        for i, score in enumerate(scores, first):
            weights, added = weigh(score, top)
            total = added if total is None else total + added
            products = [self.weighted(weights, tile) for tile in values(i)]
            acc = products if acc is None else [a + b for a, b in zip(acc, products, strict=True)]
        return _State(top, total, acc)

    def share(self) -> Any:
        """Return what the weighted values of each row are multiplied by, float32 [heads, rows, 1]; 0 for a row that saw
        nothing."""
        return jnp.where(self.top[:, :, :1] > MASKED / 2, 1 / jnp.sum(self.total[...], axis=2, keepdims=True), 0)

    def result(self):
        """Return the attention of each row, float32 [heads, rows, value lanes]."""
        return self.acc[...] * self.share()

    def scores(self, k: list[Tile]):
        """Return the scores of a span of keys, float32 [heads, rows, keys], in units of log 2."""
        parts = []
        for t, tile in enumerate(k):
            part = self._product(self.q[:, :, t * LANES : (t + 1) * LANES], tile.rows, ((2,), (2,)))
            parts.append(part if tile.scales is None else part * of_row(tile.scales, part.shape[1]))
        scores = sum(parts[1:], parts[0])
        scores = scores if k[0].scales is None else add_halves(scores)
        if self.soft_cap is None:
            return scores * (self.scale * LOG2E)
        return (self.soft_cap * LOG2E) * jnp.tanh(scores * (self.scale / self.soft_cap))

    def weighted(self, weights, v: Tile):
        """Return the sums of a tile of values, each times its weight, float32 [heads, rows, 128]."""
        if v.scales is not None:
            weights = weights * of_row(v.scales, weights.shape[1])
        return self._product(weights, v.rows, ((2,), (1,)))

    def _product(self, a, b, contract):
        """Return the batched matrix product, [heads, ., .] in float32."""
        return lax.dot_general(
            a.astype(self.compute_dtype),
            b.astype(self.compute_dtype),
            (contract, ((0,), (0,))),
            precision=lax.Precision.HIGHEST if self.compute_dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )


@jax.jit
def weigh(scores: Any, top: Any) -> tuple[Any, Any]:
    """Return a span's weights, and their sum in each lane."""
    parts = [jnp.exp2(scores[:, :, j : j + LANES] - top) for j in range(0, scores.shape[2], LANES)]
    return jnp.concatenate(parts, axis=2), sum(parts[1:], parts[0])
