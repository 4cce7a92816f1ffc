"""Ranks tokens for those who ask: the most likely ones, and a token's place among all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

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
    """Return what `rank` does for rows that nobody asks about."""
    return jnp.zeros(rows, jnp.int32), jnp.zeros((rows, top), jnp.int32), jnp.zeros((rows, top), jnp.float32)
