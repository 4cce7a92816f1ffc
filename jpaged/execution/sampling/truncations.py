"""How a row draws: its temperature, and the truncations of the tokens that can be drawn. Exact, without a sort."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from jpaged.execution.mesh import HostOrDevice
from jpaged.execution.sampling.edit import Edit, with_rows
from jpaged.scheduling.request import Request
from jpaged.scheduling.step import Sample

LEAST = float(np.finfo(np.float32).tiny)
"""Least temperature and top_p: below it float32 arithmetic has 0, logits divided by 0 and a nucleus of no token."""
ALL = 2**31 - 1
"""A top_k that keeps every token."""


class DrawnRows(NamedTuple):
    """Says how rows draw.

    Attributes:
        temperature: 0 = greedy.
        seed: the sequence's seed, as two 32-bit words.
    """

    temperature: Float[HostOrDevice, " seqs"]
    seed: UInt32[HostOrDevice, "seqs 2"]


class Temperature(Edit[DrawnRows]):
    """Lets a row draw at random. Its arrays are the sampler's, which divides logits by the temperature."""

    fields = ("temperature",)
    arrays = DrawnRows
    by_sequence = True

    def asks(self, request: Request) -> bool:
        return request.params.temperature > 0

    def blank(self, width: int, vocab_size: int) -> DrawnRows:
        return DrawnRows(np.zeros(width, np.float32), np.zeros((width, 2), np.uint32))

    def fill(self, rows: Sequence[int], samples: Sequence[Sample], blank: DrawnRows) -> DrawnRows:
        temperature, seeds = np.array(blank.temperature), np.array(blank.seed)
        for row in rows:
            request, seq, _ = samples[row]
            temperature[row] = max(request.params.temperature, LEAST)
            seed = request.seed_of(seq)
            seeds[row] = seed >> 32, seed & 0xFFFFFFFF
        return DrawnRows(temperature, seeds)


class LeastWeights(NamedTuple):
    """Holds the weight below which a row cannot draw a token, where the most likely one weighs 1; 0 = all."""

    min_p: Float[HostOrDevice, " seqs"]


class MinP(Edit[LeastWeights]):
    """Keeps the tokens that are at least min_p times as likely as the most likely one."""

    fields = ("min_p",)
    arrays = LeastWeights
    by_sequence = True

    def asks(self, request: Request) -> bool:
        return request.params.temperature > 0 and request.params.min_p > 0

    def blank(self, width: int, vocab_size: int) -> LeastWeights:
        return LeastWeights(np.zeros(width, np.float32))

    def fill(self, rows: Sequence[int], samples: Sequence[Sample], blank: LeastWeights) -> LeastWeights:
        return LeastWeights(with_rows(blank.min_p, rows, (samples[row].request.params.min_p for row in rows)))

    def truncate(self, weights: Float[Array, "seqs vocab"], arrays: LeastWeights) -> Float[Array, "seqs vocab"]:
        return jnp.where(weights >= arrays.min_p[:, None], weights, 0.0)


class LikelyTokens(NamedTuple):
    """Holds how many tokens a row can draw, the most likely ones; `ALL` = all."""

    top_k: Int[HostOrDevice, " seqs"]


class TopK(Edit[LikelyTokens]):
    """Keeps the k most likely tokens, and those that are as likely as the k-th."""

    fields = ("top_k",)
    arrays = LikelyTokens
    by_sequence = True

    def asks(self, request: Request) -> bool:
        return request.params.temperature > 0 and request.params.top_k > 0

    def blank(self, width: int, vocab_size: int) -> LikelyTokens:
        return LikelyTokens(np.full(width, ALL, np.int32))

    def fill(self, rows: Sequence[int], samples: Sequence[Sample], blank: LikelyTokens) -> LikelyTokens:
        return LikelyTokens(with_rows(blank.top_k, rows, (min(samples[row].request.params.top_k, ALL) for row in rows)))

    def truncate(self, weights: Float[Array, "seqs vocab"], arrays: LikelyTokens) -> Float[Array, "seqs vocab"]:
        vocab = weights.shape[1]

        def most_likely() -> Float[Array, "seqs vocab"]:
            k = jnp.clip(arrays.top_k, 1, vocab)
            kth = largest_threshold(weights, lambda kept: kept.sum(axis=1), k)
            return jnp.where(weights >= kth[:, None], weights, 0.0)

        return lax.cond(jnp.any(arrays.top_k < vocab), most_likely, lambda: weights)


class Nuclei(NamedTuple):
    """Holds the probability that the tokens which a row can draw have to reach; 1 = all."""

    top_p: Float[HostOrDevice, " seqs"]


class TopP(Edit[Nuclei]):
    """Keeps the fewest most likely tokens whose probability, among those kept so far, reaches top_p."""

    fields = ("top_p",)
    arrays = Nuclei
    by_sequence = True

    def asks(self, request: Request) -> bool:
        return request.params.temperature > 0 and request.params.top_p < 1

    def blank(self, width: int, vocab_size: int) -> Nuclei:
        return Nuclei(np.ones(width, np.float32))

    def fill(self, rows: Sequence[int], samples: Sequence[Sample], blank: Nuclei) -> Nuclei:
        return Nuclei(with_rows(blank.top_p, rows, (max(samples[row].request.params.top_p, LEAST) for row in rows)))

    def truncate(self, weights: Float[Array, "seqs vocab"], arrays: Nuclei) -> Float[Array, "seqs vocab"]:
        def nucleus() -> Float[Array, "seqs vocab"]:
            mass = jnp.asarray(arrays.top_p) * weights.sum(axis=1)
            least = largest_threshold(weights, lambda kept: jnp.where(kept, weights, 0.0).sum(axis=1), mass)
            keep = (weights >= least[:, None]) | (arrays.top_p >= 1.0)[:, None]
            return jnp.where(keep, weights, 0.0)

        return lax.cond(jnp.any(arrays.top_p < 1.0), nucleus, lambda: weights)


# ---------------------------------------------------------------- the search for a weight

BITS = 30
"""Bits in which weights from 0 to 1 differ: the pattern of 1 is below 2^30."""
BITS_A_PASS = 3
"""Bits that a pass over the vocabulary finds on accelerators: there, comparing with seven thresholds takes hardly
longer than with one, as reading the weights takes longer than both. A CPU finds one."""


def largest_threshold(
    weights: Float[Array, "seqs vocab"],
    measure: Callable[[Bool[Array, "seqs vocab"]], Shaped[Array, " seqs"]],
    wanted: Shaped[Array, " seqs"],
) -> Float[Array, " seqs"]:
    """Return the largest t for which the `measure` of the tokens with weight >= t is at least `wanted`.

    Exact: floats from 0 on order like their bit patterns, so narrowing the integers down finds the very value, and
    the same one whatever the number of bits a pass.

    Args:
        weights: from 0 to 1.
        measure: does not fall when tokens are added.
        wanted: is met by all tokens together.
    """
    search = partial(_search, weights, measure, wanted)
    return lax.platform_dependent(cpu=partial(search, 1), default=partial(search, BITS_A_PASS))


def _search(
    weights: Float[Array, "seqs vocab"],
    measure: Callable[[Bool[Array, "seqs vocab"]], Shaped[Array, " seqs"]],
    wanted: Shaped[Array, " seqs"],
    bits_a_pass: int,
) -> Float[Array, " seqs"]:
    """See `largest_threshold`; `bits_a_pass` divides `BITS`."""
    bits = lax.bitcast_convert_type(weights, jnp.int32)
    passes = BITS // bits_a_pass

    def narrow(number: Int[Array, ""], low: Int[Array, " seqs"]) -> Int[Array, " seqs"]:
        shift = (passes - 1 - number) * bits_a_pass
        met = jnp.zeros_like(low)  # how many of the candidates, which ascend, are low enough
        for digit in range(1, 1 << bits_a_pass):
            kept = bits >= (low | (digit << shift))[:, None]
            met += (measure(kept) >= wanted).astype(jnp.int32)
        return low | (met << shift)

    low = lax.fori_loop(0, passes, narrow, jnp.zeros(weights.shape[0], jnp.int32))
    return lax.bitcast_convert_type(low, jnp.float32)
