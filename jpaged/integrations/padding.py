"""Tells padding from tokens where the token that pads may be one of a sequence too."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def after_first(chosen: Bool[Array, "batch tokens"]) -> Bool[Array, "batch tokens"]:
    """Return which tokens are the first chosen one of their row, or stand behind it."""
    return jnp.cumsum(chosen, axis=1) > 0


def before_last(chosen: Bool[Array, "batch tokens"]) -> Bool[Array, "batch tokens"]:
    """Return which tokens are the last chosen one of their row, or stand before it."""
    return after_first(chosen[:, ::-1])[:, ::-1]


def completed(
    completions: Int[Array, "batch completion"], pad: int, ends: Sequence[int]
) -> Bool[Array, "batch completion"]:
    """Return which tokens are a completion's: those up to the last that does not pad.

    Where `pad` ends completions too, the one behind them is a completion's as well, unless it ended by another token.

    Args:
        pad: the token that pads, behind a completion.
        ends: tokens that end a completion.
    """
    own = before_last(completions != pad)
    if pad not in ends:
        return own
    length = own.sum(axis=1, keepdims=True)
    last = jnp.take_along_axis(completions, jnp.maximum(length - 1, 0), axis=1)
    is_open = (length == 0) | ~jnp.isin(last, jnp.asarray(list(ends)))
    return own | (is_open & (jnp.arange(completions.shape[1]) == length))
