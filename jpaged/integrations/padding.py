"""Separates padding from tokens when the padding token may also be part of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def after_first(chosen: Bool[Array, "batch tokens"]) -> Bool[Array, "batch tokens"]:
    """Return a mask of each row from its first chosen token on."""
    return jnp.cumsum(chosen, axis=1) > 0


def before_last(chosen: Bool[Array, "batch tokens"]) -> Bool[Array, "batch tokens"]:
    """Return a mask of each row up to its last chosen token."""
    return after_first(chosen[:, ::-1])[:, ::-1]


def completed(
    completions: Int[Array, "batch completion"], pad: int, ends: Sequence[int]
) -> Bool[Array, "batch completion"]:
    """Return a mask of the completions' tokens: those up to the last one that is not padding.

    If `pad` also ends completions, the first padding token belongs to a completion that no other token ended.

    Args:
        pad: the padding token after a completion.
        ends: tokens that end a completion.
    """
    own = before_last(completions != pad)
    if pad not in ends:
        return own
    length = own.sum(axis=1, keepdims=True)
    last = jnp.take_along_axis(completions, jnp.maximum(length - 1, 0), axis=1)
    is_open = (length == 0) | ~jnp.isin(last, jnp.asarray(list(ends)))
    return own | (is_open & (jnp.arange(completions.shape[1]) == length))
