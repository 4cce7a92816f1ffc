"""Implements paged_attention in plain jnp: gather every token's whole context, mask, softmax.

`Reach`, which all implementations take, limits how far back a query sees: everything, a sliding window, or its own
chunk of the sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_codes import decode, tokens_of
from pallas_kernels.layout import unpack_kv


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


class AttentionCall(NamedTuple):
    """Holds the arguments of `pallas_kernels.paged_attention.paged_attention`, as each platform's version takes them.

    Attributes:
        value_dim: the first numbers of a row that are its value, where a row is key and value at once (see
            `pallas_kernels.latent_attention`); None: K and V lie as `pallas_kernels.layout` says.
    """

    q: Float[Array, "tokens kv_heads q_per_kv head_dim"]
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"]
    layer: int | Int[Array, ""]
    block_tables: Int[Array, "seqs pages"]
    query_starts: Int[Array, " seqs+1"]
    kv_lens: Int[Array, " seqs"]
    scale: float
    soft_cap: float | None = None
    sliding_window: int | None = None
    chunk_size: int | None = None
    sinks: Float[Array, "kv_heads q_per_kv"] | None = None
    last_keys: Int[Array, " tokens"] | None = None
    max_query_len: int | None = None
    value_dim: int | None = None

    @property
    def reach(self) -> Reach:
        """Return what limits the keys that a query sees."""
        return Reach(self.sliding_window, self.chunk_size)


def paged_attention(call: AttentionCall) -> Float[Array, "tokens kv_heads q_per_kv value_dim"]:
    """See `pallas_kernels.paged_attention.paged_attention`."""
    q, view, query_starts, kv_lens = call.q, call.view, call.query_starts, call.kv_lens
    block_tables, soft_cap, sinks, value_dim = call.block_tables, call.soft_cap, call.sinks, call.value_dim
    tokens, _, _, head_dim = q.shape
    seqs, pages = block_tables.shape
    blocks, _, kv_heads, tiles, _, lanes = view.shape
    block_size = tokens_of(view)

    token = jnp.arange(tokens)
    seq = jnp.clip(jnp.searchsorted(query_starts[1:], token, side="right"), 0, seqs - 1)
    query_pos = kv_lens[seq] - query_starts[seq + 1] + token
    last = query_pos if call.last_keys is None else call.last_keys
    key_pos = jnp.arange(pages * block_size)

    table = block_tables[seq]
    known = (table >= 0) & (table < blocks)
    seen = jnp.repeat(known, block_size, axis=1) & (key_pos <= last[:, None])
    seen &= (token < query_starts[-1])[:, None]
    seen &= key_pos >= call.reach.first_key(query_pos)[:, None]

    rows = decode(view[jnp.where(known, table, 0), call.layer])
    rows = jnp.moveaxis(rows, 4, 2).reshape(tokens, pages * block_size, kv_heads, tiles, lanes)
    rows = jnp.where(seen[:, :, None, None, None], rows, 0)  # unseen memory may hold NaN
    if value_dim is None:
        k, v = unpack_kv(rows, head_dim)
    else:
        flat = rows.reshape(*rows.shape[:-2], -1)
        k, v = flat[..., :head_dim], flat[..., :value_dim]

    scores = call.scale * jnp.einsum("thgd,tkhd->thgk", q.astype(jnp.float32), k, precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    mask = seen[:, None, None, :]
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32)[..., None]
        top = jnp.maximum(top, sink)
    weights = jnp.where(mask, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sink - top)
    weights /= jnp.where(total > 0, total, 1)  # a query that sees nothing gives 0
    return jnp.einsum("thgk,tkhd->thgd", weights, v, precision="highest").astype(q.dtype)
