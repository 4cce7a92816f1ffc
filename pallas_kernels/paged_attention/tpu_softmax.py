"""Does the arithmetic of the TPU kernel: one span of keys is added to the online softmax of some queries.

It is FlashAttention-2 (arXiv 2307.08691, algorithm 1), with the sum of the weights kept per lane: lane l of
`total` sums the keys at positions l, l + 128, ... and the lanes are added up once, at the end. The maximum is the same
in all lanes, so nothing is broadcast from one lane to the others. Scores are in units of ``log 2``, as a TPU has an
instruction for powers of two and a power of e is one of them and a multiplication.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import LANES
from pallas_kernels.paged_attention.tpu_codes import Tile, add_halves, of_row

LOG2E = math.log2(math.e)
MASKED = -1e30
"""A finite stand-in for -inf: differences of two of them stay numbers."""


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
        sinks: VMEM float32 [heads, rows, 128], a logit a row that gives nothing, in units of log 2 and the same in all
            lanes; None = none.
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
        """Begin with the sinks only, whose weight of one is counted in the first lane."""
        if self.sinks is None:
            self.top[...] = jnp.full(self.top.shape, MASKED, jnp.float32)
            self.total[...] = jnp.zeros(self.total.shape, jnp.float32)
        else:
            self.top[...] = self.sinks[...]
            lane = lax.broadcasted_iota(jnp.int32, self.total.shape, 2)
            self.total[...] = jnp.where(lane == 0, 1.0, 0.0)
        self.acc[...] = jnp.zeros(self.acc.shape, jnp.float32)

    def add(self, keys, values, spans: int, seen=None) -> None:
        """Attend to some spans of keys, each a multiple of 128.

        Args:
            keys, values: span i as a list of tiles; called in order, all keys first.
            seen: bool [rows, keys of all spans]; None = all. Values that no row sees must be finite.
        """
        # The loops over spans and tiles of lanes are unrolled, so that the compiler can overlap the products of one
        # span with the exponentials of another. All scores are live at once, [heads, rows, span] each.
        scores = [self._scores(keys(i)) for i in range(spans)]
        if seen is not None:
            width = scores[0].shape[2]
            scores = [jnp.where(seen[None, :, i * width : (i + 1) * width], s, MASKED) for i, s in enumerate(scores)]
        highest = [jnp.max(s, axis=2, keepdims=True) for s in scores]
        # A row that has seen nothing yet keeps top == MASKED and adds ones here; its first real score wipes them.
        old_top = self.top[...]
        top = functools.reduce(jnp.maximum, highest, old_top)
        fade = jnp.exp2(old_top - top)
        total = fade * self.total[...]
        acc = [fade * self.acc[:, :, t : t + LANES] for t in range(0, self.acc.shape[2], LANES)]
        for i, score in enumerate(scores):
            parts = [jnp.exp2(score[:, :, j : j + LANES] - top) for j in range(0, score.shape[2], LANES)]
            total += sum(parts[1:], parts[0])
            weights = jnp.concatenate(parts, axis=2)
            acc = [a + self._weighted(weights, tile) for a, tile in zip(acc, values(i), strict=True)]
        self.top[...] = top
        self.total[...] = total
        self.acc[...] = jnp.concatenate(acc, axis=2)

    def result(self):
        """Return the attention of each row, float32 [heads, rows, value lanes]; 0 for a row that saw nothing."""
        weight = jnp.where(self.top[:, :, :1] > MASKED / 2, 1 / jnp.sum(self.total[...], axis=2, keepdims=True), 0)
        return self.acc[...] * weight

    def _scores(self, k: list[Tile]):
        parts = []
        for t, tile in enumerate(k):
            part = self._product(self.q[:, :, t * LANES : (t + 1) * LANES], tile.rows, ((2,), (2,)))
            parts.append(part if tile.scales is None else part * of_row(tile.scales, part.shape[1]))
        scores = sum(parts[1:], parts[0])
        scores = scores if k[0].scales is None else add_halves(scores)
        if self.soft_cap is None:
            return scores * (self.scale * LOG2E)
        return (self.soft_cap * LOG2E) * jnp.tanh(scores * (self.scale / self.soft_cap))

    def _weighted(self, weights, v: Tile):
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
