"""Runs a model's layers without a pool: over a batch of whole sequences, differentiably.

Everything is XLA's: no custom call, nothing donated. Sequences lie one after another in the rows that a model sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jpaged.model_api import (
    AttentionGroup,
    CrossAttentionGroup,
    ImageGroup,
    LatentGroup,
    LayerGroup,
    LayerRef,
    StateGroup,
)
from pallas_kernels.recurrent.sequences import over_sequences

Cache = dict[str, tuple[Array, Array]]
"""K and V of the layer of a group that kept some last, where other layers of the group read them."""


def places(real: Bool[Array, "batch tokens"]) -> Int[Array, "batch tokens"]:
    """Return each token's position in its sequence; padding has some position."""
    return jnp.maximum(jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1, 0)


def empty_cache(groups: Sequence[LayerGroup], rows: int, dtype: Any) -> Cache:
    """Return the cache that a model is called with, for `rows` tokens over all sequences."""
    shared = [group for group in groups if isinstance(group, AttentionGroup) and group.readers]
    nothing = {group.name: jnp.zeros((rows, group.kv_heads, group.head_dim), dtype) for group in shared}
    return {name: (zeros, zeros) for name, zeros in nothing.items()}


def layer_operations(
    groups: Sequence[LayerGroup], real: Bool[Array, "batch tokens"]
) -> Callable[..., tuple[Cache, Any]]:
    """Return the function that the model calls with a layer of any kind, see `jpaged.model_api.Attend`.

    Tokens of no image are given: what a model keeps of images is as in a step without any.

    Args:
        real: which tokens are a sequence's; those lie side by side, with padding before or after them.
    """
    kinds: Mapping[str, LayerGroup] = {group.name: group for group in groups}

    def operate(cache: Cache, layer: LayerRef, *operands: Any, **options: Any) -> tuple[Cache, Any]:
        group = kinds[layer.group]
        if isinstance(group, AttentionGroup):
            return _attend(cache, group, real, *operands, **options)
        if isinstance(group, LatentGroup):
            return cache, _attend_to_latents(group, real, *operands, **options)
        if isinstance(group, StateGroup):
            return cache, _recur(group, real, *operands, **options)
        if isinstance(group, ImageGroup):
            return cache, operands[0]
        if isinstance(group, CrossAttentionGroup):
            return cache, None
        raise ValueError(f"layer group {group.name!r} ({group.kind}) cannot be computed without the engine's pool")

    return operate


def _attend(
    cache: Cache,
    group: AttentionGroup,
    real: Array,
    q: Float[Array, "rows kv_heads q_per_kv head_dim"],
    k: Float[Array, "rows kv_heads head_dim"] | None,
    v: Float[Array, "rows kv_heads head_dim"] | None,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, "kv_heads q_per_kv"] | None = None,
) -> tuple[Cache, Array]:
    if k is None or v is None:
        k, v = cache[group.name]
    elif group.name in cache:
        cache = {**cache, group.name: (k, v)}
    seen = _seen(real, places(real), group.sliding_window, group.chunk_size)
    queries, keys, values = _of_sequences(real, q), _of_sequences(real, k), _of_sequences(real, v)
    out = _softmax_attention(queries, keys, values, seen, scale, soft_cap, sinks)
    return cache, out.reshape(q.shape)


def _attend_to_latents(
    group: LatentGroup,
    real: Array,
    q: Float[Array, "rows heads width"],
    rows: Float[Array, "rows width"],
    *,
    scale: float,
) -> Float[Array, "rows heads rank"]:
    """Attend in the latents' space: a row is the key of all heads, its latent their value."""
    key = _of_sequences(real, rows[:, None])
    queries = _of_sequences(real, q[:, None])  # one key, of which all heads are queries
    out = _softmax_attention(queries, key, key[..., : group.rank], _seen(real, places(real)), scale, None, None)
    return out.reshape(len(q), q.shape[1], group.rank)


def _recur(
    group: StateGroup,
    real: Array,
    part: str,
    kernel: Callable[..., Any],
    *operands: Array | None,
    axes: Sequence[int | None],
    out_axis: int,
    **options: Any,
) -> Array:
    del axes, out_axis  # how operands are split is the partitioner's here
    state = next(array.shape for array in group.parts if array.name == part)
    return over_sequences(kernel, state, real, *operands, **options)


def _of_sequences(real: Array, rows: Array) -> Array:
    return rows.reshape(*real.shape, *rows.shape[1:])


def _seen(
    real: Bool[Array, "batch tokens"],
    positions: Int[Array, "batch tokens"],
    window: int | None = None,
    chunk: int | None = None,
) -> Bool[Array, "batch tokens tokens"]:
    """Return which token (last axis) each token sees; padding sees itself, to avoid a division by 0."""
    query, key = positions[:, :, None], positions[:, None, :]
    seen = (key <= query) & real[:, None, :] & real[:, :, None]
    if window is not None:
        seen &= key > query - window
    if chunk is not None:
        seen &= key // chunk == query // chunk
    return seen | jnp.eye(real.shape[1], dtype=bool)


def _softmax_attention(
    q: Float[Array, "batch tokens kv_heads q_per_kv key_width"],
    k: Float[Array, "batch tokens kv_heads key_width"],
    v: Float[Array, "batch tokens kv_heads value_width"],
    seen: Bool[Array, "batch tokens tokens"],
    scale: float,
    soft_cap: float | None,
    sinks: Float[Array, "kv_heads q_per_kv"] | None,
) -> Float[Array, "batch tokens kv_heads q_per_kv value_width"]:
    """Attend with the softmax in float32; the derivative computes the scores again, which take the most memory."""

    @jax.checkpoint
    def attention(q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
        wide = (x.astype(jnp.float32) for x in (q, k))
        scores = scale * jnp.einsum("bthgd,bshd->bhgts", *wide, precision="highest")
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        if sinks is not None:
            sink = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, :, None, None], (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, sink], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : seen.shape[-1]]
        out = jnp.einsum("bhgts,bshd->bthgd", weights, v.astype(jnp.float32), precision="highest")
        return out.astype(q.dtype)

    return attention(q, k, v, sinks)
