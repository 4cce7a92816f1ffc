"""Lets a head that drafts read, at each token, a vector of the token before it, which the pool keeps between steps.

The layers of `mtp` and `eagle3` keep KV: the entry of position ``p`` is made of token ``p`` and the model's state of
token ``p - 1``. So it depends on tokens up to there only, as the model's own KV does, and is found in the prefix cache,
swapped and forked with it. Published code counts entries from the states instead, the first of which is joined with the
second token. It has none of the first token alone, so no query may see the one that is kept here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.model_api import (
    Attend,
    AttendToLatents,
    AttentionGroup,
    BuildContext,
    LatentGroup,
    LayerRef,
    PreviousTokenGroup,
    TakePreviousToken,
)

PREVIOUS = "previous"
"""The layer group that keeps the hidden state of a sequence's newest token."""
_MARK, _AGAINST = 16.0, -1e4
"""The first token's key has the one where others have 0, and queries have the other there; both fit in float16. Their
product, scaled, is so far below other scores that its exponential is 0 in float32."""

LayerMemory = AttentionGroup | LatentGroup


def memory_of_head(memory: LayerMemory, width: int, build: BuildContext) -> tuple[LayerMemory, PreviousTokenGroup]:
    """Return the layer groups of a head of one layer that keeps `memory` and, of the newest token, a vector; see
    `without_first` for what is added to a key."""
    if isinstance(memory, LatentGroup):
        memory = replace(memory, rotary=memory.rotary + 1)
    else:
        memory = replace(memory, head_dim=memory.head_dim + 1)
    return memory, PreviousTokenGroup(PREVIOUS, (0,), width, np.dtype(build.dtype).name)


def take_previous(
    cache: Any, attend: Attend, vectors: Float[Array, "tokens embed"]
) -> tuple[Any, Float[Array, "tokens embed"]]:
    """Return for each token what `vectors` is for the token before it, 0 for a sequence's first one; the newest token's
    is kept for the next step."""
    take: TakePreviousToken = attend  # type: ignore[assignment]  # one callback serves layers of every kind
    return take(cache, LayerRef(PREVIOUS, 0), vectors)


def without_first(attend: Attend, positions: Int[Array, " tokens"]) -> Attend:
    """Return `attend` for queries that do not see their sequence's first token.

    Keys are one number wider: it is `_MARK` in the first token's, whose others are 0, and 0 in all others; queries have
    `_AGAINST` there. So no kernel has a mask for it, and a key that is kept in few bits hides as well.
    """
    first = (positions == 0)[:, None]

    def marked(keys: Array) -> Array:
        hidden = first.reshape(-1, *(1,) * (keys.ndim - 1))
        mark = _MARK * jnp.broadcast_to(hidden, (*keys.shape[:-1], 1)).astype(keys.dtype)
        return jnp.concatenate([jnp.where(hidden, 0, keys), mark], axis=-1)

    def against(q: Array) -> Array:
        return jnp.pad(q, (*((0, 0),) * (q.ndim - 1), (0, 1)), constant_values=_AGAINST)

    def seeing_the_rest(
        cache: Any, layer: LayerRef, q: Array, k: Array, v: Array | None = None, *, scale: float, **options: Any
    ) -> tuple[Any, Array]:
        if v is None:  # latents, whose rows are keys and values at once
            to_latents: AttendToLatents = attend  # type: ignore[assignment]  # as above
            return to_latents(cache, layer, against(q), marked(k), scale=scale)
        if options.get("soft_cap") is not None:
            raise ValueError("a head that drafts takes no soft cap of scores, which would show it its first token")
        values = jnp.pad(jnp.where(first[:, None], 0, v), ((0, 0), (0, 0), (0, 1)))
        cache, mixed = attend(cache, layer, against(q), marked(k), values, scale=scale, **options)
        return cache, mixed[..., :-1]

    return seeing_the_rest  # type: ignore[return-value]
