"""Samples on the device: edits the logits, truncates what can be drawn, and draws; no neighbour can change a draw.

A sequence's random numbers come from ``fold_in(key(seed), position)``, one for each token of the vocabulary, so a
draw depends on the sequence's own logits, seed and position only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jpaged.execution.mesh import HostOrDevice
from jpaged.execution.sampling.registry import EDITS, TEMPERATURE
from jpaged.execution.sampling.truncations import DrawnRows
from pallas_kernels.platform import Impl
from pallas_kernels.row_ops import largest

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
        position: position of the token that is drawn; 0 for padding.
        ranked: whether the request needs the most likely tokens.
        edits: the arrays of each of `EDITS`, in their order; None where no row has any, until the worker puts blank
            ones there.
    """

    position: Int[HostOrDevice, " seqs"]
    ranked: Bool[HostOrDevice, " seqs"]
    edits: tuple[Any, ...]

    @property
    def tabled(self) -> bool:
        """Tell whether lists of pairs are, or go, into tables, as one is too long for the sampler."""
        width = self.position.shape[-1]
        return any(edit.tabled(arrays, width) for edit, arrays in zip(EDITS, self.edits, strict=True))

    @property
    def plain(self) -> bool:
        """Tell, on the host, whether every row takes the most likely token of its unedited logits, and no row asks for
        others."""
        return not any(edit is not None for edit in self.edits) and not self.ranked.any()


def sample(
    logits: Float[Array, "seqs vocab"],
    args: SamplingArrays,
    last_tokens: Int[Array, " max_seqs"],
    impl: Impl = "xla",
) -> tuple[Int[Array, " seqs"], Float[Array, " seqs"]]:
    """Draw one token a row; returns (tokens, their log-probabilities under the unedited softmax).

    `last_tokens` were sampled in the step before; see `newest`. `impl` is that of `row_ops.largest`.
    """
    edited = logits
    for edit, arrays in zip(EDITS, args.edits, strict=True):
        edited = edit.edit(edited, arrays, last_tokens)
    greedy = _argmax(edited)
    drawn: DrawnRows = args.edits[EDITS.index(TEMPERATURE)]
    tokens = lax.cond(jnp.any(drawn.temperature > 0), lambda: _draw(edited, args, drawn, greedy), lambda: greedy)
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


def _draw(
    logits: Float[Array, "seqs vocab"], args: SamplingArrays, rows: DrawnRows, greedy: Int[Array, " seqs"]
) -> Int[Array, " seqs"]:
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    scaled = (logits - logits.max(axis=1, keepdims=True)) / temperature
    weights = jnp.exp(scaled)  # the most likely token weighs 1
    for edit, arrays in zip(EDITS, args.edits, strict=True):
        weights = edit.truncate(weights, arrays)
    drawn = _argmax(-_arrivals(weights, rows.seed, args.position))
    return jnp.where(rows.temperature > 0, drawn, greedy)


def _arrivals(
    weights: Float[Array, "seqs vocab"], seeds: UInt32[HostOrDevice, "seqs 2"], positions: Int[HostOrDevice, " seqs"]
) -> Float[Array, "seqs vocab"]:
    """Return when each token arrives in a race of exponential clocks of rate `weights`; the first is a draw.

    Every token has a separate random number, from (seed, position, token). Rounding of the weights then changes a
    draw only where two tokens arrive together; a cumulative sum would shift the borders of all rare tokens.
    """

    def bits(seed: UInt32[Array, " 2"], position: Int[Array, ""]) -> UInt32[Array, " vocab"]:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, position), weights.shape[1:], jnp.uint32)

    drawn = jax.vmap(bits)(jnp.asarray(seeds), jnp.asarray(positions))
    # Early arrivals decide: in steps of 2^-32 they are far apart, which 24 bits of a usual uniform number are not.
    uniform = jnp.minimum((drawn.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return jnp.where(weights > 0, -jnp.log1p(-uniform) / weights, jnp.inf)
