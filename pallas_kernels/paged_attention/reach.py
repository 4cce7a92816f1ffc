"""Says how far back a query sees: everything, a sliding window, or its own chunk of the sequence."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


class Reach(NamedTuple):
    """Limits what a query sees, statically, in tokens; None = no such limit.

    Attributes:
        window: tokens a query sees, itself included.
        chunk: a query sees its own chunk only, the tokens at ``position // chunk`` equal to its own (Llama 4).
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def limited(self) -> bool:
        return self.window is not None or self.chunk is not None

    def first_key(self, query: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Return the position of the first key that the query at a position sees."""
        first = jnp.zeros_like(query)
        if self.window is not None:
            first = jnp.maximum(first, query - self.window + 1)
        if self.chunk is not None:
            first = jnp.maximum(first, query - lax.rem(query, jnp.asarray(self.chunk, query.dtype)))
        return first
