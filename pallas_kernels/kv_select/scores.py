"""Computes how much the last queries of a sequence look at each of its tokens."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_codes import decode, tokens_of
from pallas_kernels.layout import unpack_kv

_SPAN = 512
"""Keys whose K is in float32 at once."""


def attention_scores(
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    q: Float[Array, "window kv_heads q_per_kv head_dim"],
    table: Int[Array, " pages"],
    length: Int[Array, ""],
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, "kv_heads q_per_kv"] | None = None,
) -> Float[Array, "kv_heads keys"]:
    """Return the attention weights that each cached token gets, summed over the last queries of the query heads of a KV
    head.

    Query i is that of token ``length - window + i`` and sees the tokens up to its own. The softmax runs in float32, in
    two passes over the keys: its statistics first, then the weights, so that no array of weights is held. Tokens from
    `length` on have 0; `keys` is the number of slots in the table, rounded up to whole spans.

    The arguments are those of `pallas_kernels.kv_select.kv_select`.
    """
    window, heads, q_per_kv, head_dim = q.shape
    blocks, layers, _, _, block_rows, lanes = view.shape
    block_size = tokens_of(view)
    per_span = min(max(1, _SPAN // block_size), len(table))
    span = per_span * block_size
    num_spans = -(-len(table) // per_span)
    table = jnp.pad(table, (0, num_spans * per_span - len(table)), constant_values=-1)
    flat = view.reshape(blocks * layers, heads, -1, block_rows, lanes)
    queries = scale * q.astype(jnp.float32).transpose(1, 0, 2, 3).reshape(heads, window * q_per_kv, head_dim)
    last_key = jnp.repeat(length - window + jnp.arange(window), q_per_kv)

    def logits(i: Int[Array, ""]) -> Float[Array, "kv_heads rows span"]:
        """Return the logits of all queries and the keys of a span; -inf where a query does not see a key."""
        block = jnp.clip(lax.dynamic_slice(table, (i * per_span,), (per_span,)), 0, blocks - 1)
        rows = decode(flat.at[block * layers + layer].get(mode="promise_in_bounds"))
        rows = rows.transpose(1, 0, 3, 2, 4).reshape(heads, span, -1, lanes)
        k, _ = unpack_kv(rows, head_dim)
        seen = i * span + jnp.arange(span) <= last_key[:, None]
        product = jnp.einsum("hrd,hkd->hrk", queries, jnp.where(_any(seen), k, 0), precision="highest")
        return jnp.where(seen, product if soft_cap is None else soft_cap * jnp.tanh(product / soft_cap), -jnp.inf)

    def statistics(i: Int[Array, ""], state: tuple[Array, Array]) -> tuple[Array, Array]:
        top, total = state
        mine = logits(i)
        new_top = jnp.maximum(top, mine.max(axis=2))
        return new_top, total * jnp.exp(top - new_top) + jnp.exp(mine - new_top[..., None]).sum(axis=2)

    if sinks is None:
        state = jnp.full((heads, window * q_per_kv), -1e30), jnp.zeros((heads, window * q_per_kv))
    else:
        state = jnp.tile(sinks.astype(jnp.float32), (1, window)), jnp.ones((heads, window * q_per_kv))
    used = (length + span - 1) // span
    top, total = lax.fori_loop(0, used, statistics, state)

    def weigh(i: Int[Array, ""], scores: Array) -> Array:
        weights = jnp.exp(logits(i) - top[..., None]) / total[..., None]
        return lax.dynamic_update_slice(scores, weights.sum(axis=1), (0, i * span))

    return lax.fori_loop(0, used, weigh, jnp.zeros((heads, num_spans * span)))


def _any(seen: Array) -> Array:
    """Tell which keys any query sees, to be broadcast over heads and lanes; unseen memory may hold NaN."""
    return seen.any(axis=0)[None, :, None]
