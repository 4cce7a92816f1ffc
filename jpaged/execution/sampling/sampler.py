"""Samples on the device: truncation is exact without a sort, and no neighbour can change a draw.

A sequence's random numbers come from ``fold_in(key(seed), position)``, one for each token of the vocabulary, so a
draw depends on the sequence's own logits, seed and position only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from jpaged.execution.mesh import HostOrDevice
from jpaged.execution.sampling.logit_edits import LogitEdits, edit_logits
from pallas_kernels.platform import Impl
from pallas_kernels.row_ops import largest

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


Ranking = tuple[Int[Array, " rows"], Int[Array, "rows top"], Float[Array, "rows top"]]


def rank(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, " rows"], top: int, asked: Bool[Array, ""] | bool
) -> Ranking:
    """Return (places of `tokens` from 1, the `top` most likely tokens, their log-probabilities under the softmax).

    Among equally likely tokens the lower id comes first; all of them have the place of the first. Zeros when not
    `asked`, at no cost; `top` is cut to the vocabulary.
    """
    rows, vocab = logits.shape
    top = min(top, vocab)

    def ranking() -> Ranking:
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="fill", fill_value=-jnp.inf)
        ranks = 1 + (logits > chosen).sum(axis=1, dtype=jnp.int32)
        values, ids = lax.top_k(logits, top)
        return ranks, ids, values - jax.nn.logsumexp(logits, axis=1, keepdims=True)

    nothing = no_ranking(rows, top)
    return nothing if asked is False else lax.cond(asked, ranking, lambda: nothing)


def no_ranking(rows: int, top: int) -> Ranking:
    """Return the result of `rank` for rows without a ranking."""
    return jnp.zeros(rows, jnp.int32), jnp.zeros((rows, top), jnp.int32), jnp.zeros((rows, top), jnp.float32)


class SamplingArrays(NamedTuple):
    """Holds the settings of each sampled row; padding rows are greedy.

    Attributes:
        temperature: 0 = greedy.
        top_k: vocabulary size = all.
        top_p: 1 = all.
        min_p: 0 = all.
        seed: the sequence's seed, as two 32-bit words.
        position: position of the token that is drawn; 0 for padding.
        ranked: whether the request needs the most likely tokens.
        edits: edits of the logits.
    """

    temperature: Float[HostOrDevice, " seqs"]
    top_k: Int[HostOrDevice, " seqs"]
    top_p: Float[HostOrDevice, " seqs"]
    min_p: Float[HostOrDevice, " seqs"]
    seed: UInt32[HostOrDevice, "seqs 2"]
    position: Int[HostOrDevice, " seqs"]
    ranked: Bool[HostOrDevice, " seqs"]
    edits: LogitEdits


def sample(
    logits: Float[Array, "seqs vocab"],
    args: SamplingArrays,
    last_tokens: Int[Array, " max_seqs"],
    impl: Impl = "xla",
) -> tuple[Int[Array, " seqs"], Float[Array, " seqs"]]:
    """Draw one token a row; returns (tokens, their log-probabilities under the unedited softmax).

    `last_tokens` were sampled in the step before; see `LogitEdits.pending`. `impl` is that of `row_ops.largest`.
    """
    edited = edit_logits(logits, args.edits, last_tokens)
    greedy = _argmax(edited)
    tokens = lax.cond(jnp.any(args.temperature > 0), lambda: _draw(edited, args, greedy), lambda: greedy)
    return tokens, _logprobs(logits, tokens, largest(logits, impl=impl)[1])


def most_likely(
    logits: Float[Array, "seqs vocab"], impl: Impl = "xla"
) -> tuple[Int[Array, " seqs"], Float[Array, " seqs"]]:
    """Return the result of `sample` for rows of temperature 0 without edits."""
    tokens, totals = largest(logits, impl=impl)
    return tokens, _logprobs(logits, tokens, totals)


def _logprobs(
    logits: Float[Array, "seqs vocab"], tokens: Int[Array, " seqs"], totals: Float[Array, " seqs"]
) -> Float[Array, " seqs"]:
    return jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - totals


def _argmax(x: Float[Array, "seqs vocab"]) -> Int[Array, " seqs"]:
    """Return the first index of the maximum, by two plain reductions (XLA:CPU runs a variadic one several times
    slower)."""
    ids = jnp.arange(x.shape[1], dtype=jnp.int32)
    top = x.max(axis=1, keepdims=True)
    return jnp.where(x == top, ids, x.shape[1] - 1).min(axis=1)


def _draw(logits: Float[Array, "seqs vocab"], args: SamplingArrays, greedy: Int[Array, " seqs"]) -> Int[Array, " seqs"]:
    temperature = jnp.where(args.temperature > 0, args.temperature, 1.0)[:, None]
    scaled = (logits - logits.max(axis=1, keepdims=True)) / temperature
    weights = jnp.exp(scaled)  # the most likely token weighs 1
    weights = jnp.where(weights >= args.min_p[:, None], weights, 0.0)
    truncated = (args.top_k < logits.shape[1]) | (args.top_p < 1.0)
    weights = lax.cond(jnp.any(truncated), lambda: _truncate(weights, args), lambda: weights)
    drawn = _argmax(-_arrivals(weights, args))
    return jnp.where(args.temperature > 0, drawn, greedy)


def _truncate(weights: Float[Array, "seqs vocab"], args: SamplingArrays) -> Float[Array, "seqs vocab"]:
    """Cut to the top-k tokens, then to the top-p of those; skip a search that no row asks for."""
    vocab = weights.shape[1]

    def most_likely_k() -> Float[Array, "seqs vocab"]:
        k = jnp.clip(args.top_k, 1, vocab)
        kth = largest_threshold(weights, lambda kept: kept.sum(axis=1), k)
        return jnp.where(weights >= kth[:, None], weights, 0.0)

    weights = lax.cond(jnp.any(args.top_k < vocab), most_likely_k, lambda: weights)

    def nucleus() -> Float[Array, "seqs vocab"]:
        mass = jnp.asarray(args.top_p) * weights.sum(axis=1)
        least = largest_threshold(weights, lambda kept: jnp.where(kept, weights, 0.0).sum(axis=1), mass)
        keep = (weights >= least[:, None]) | (args.top_p >= 1.0)[:, None]
        return jnp.where(keep, weights, 0.0)

    return lax.cond(jnp.any(args.top_p < 1.0), nucleus, lambda: weights)


def _arrivals(weights: Float[Array, "seqs vocab"], args: SamplingArrays) -> Float[Array, "seqs vocab"]:
    """Return when each token arrives in a race of exponential clocks of rate `weights`; the first is a draw.

    Every token has a separate random number, from (seed, position, token). Rounding of the weights then changes a
    draw only where two tokens arrive together; a cumulative sum would shift the borders of all rare tokens.
    """

    def bits(seed: UInt32[Array, " 2"], position: Int[Array, ""]) -> UInt32[Array, " vocab"]:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, position), weights.shape[1:], jnp.uint32)

    drawn = jax.vmap(bits)(jnp.asarray(args.seed), jnp.asarray(args.position))
    # Early arrivals decide: in steps of 2^-32 they are far apart, which 24 bits of a usual uniform number are not.
    uniform = jnp.minimum((drawn.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return jnp.where(weights > 0, -jnp.log1p(-uniform) / weights, jnp.inf)
