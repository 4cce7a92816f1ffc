"""Implements paged_attention for CPUs: loops that read the pool in place, compiled by Numba, called by XLA.

XLA:CPU has to gather K and V into arrays of their own before it multiplies; here each cached token is read from where
it lies. One custom call a layer, shared by XLA's threads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import KVTiles
from pallas_kernels.paged_attention.reach import Reach

QUERIES_TOGETHER = 48
"""How many queries of neighbouring tokens read keys together: so few that their scores stay in the first cache."""


def paged_attention(
    q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    block_tables: Int[Array, "seqs pages"],
    query_starts: Int[Array, " seqs+1"],
    kv_lens: Int[Array, " seqs"],
    *,
    scale: float,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    sinks: Float[Array, "kv_heads q_per_kv"] | None = None,
    last_keys: Int[Array, " tokens"] | None = None,
    max_query_len: int | None = None,
    value_dim: int | None = None,
) -> Float[Array, "tokens kv_heads q_per_kv value_dim"]:
    """See `pallas_kernels.paged_attention.paged_attention`, and `pallas_kernels.latent_attention` for `value_dim`; the
    view is float32."""
    from pallas_kernels.paged_attention.cpu_kernel import target  # needs Numba
    from pallas_kernels.paged_attention.cpu_math import NO_SINK

    tokens, kv_heads, q_per_kv, head_dim = q.shape
    held = KVTiles.of(view.shape[3], value_dim)
    queries = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, 0), (0, 0), (0, held.key_width - head_dim)))
    token = jnp.arange(tokens, dtype=jnp.int32)
    seq = jnp.minimum((token[:, None] >= query_starts[1:]).sum(axis=1, dtype=jnp.int32), len(kv_lens) - 1)
    position = kv_lens[seq] - query_starts[seq + 1] + token
    first = Reach(sliding_window, chunk_size).first_key(position)
    last = position if last_keys is None else last_keys.astype(jnp.int32)
    stop = jnp.where(token < query_starts[-1], last + 1, 0)
    shares = jnp.full((kv_heads, q_per_kv), NO_SINK) if sinks is None else sinks.astype(jnp.float32)
    scale_and_cap = jnp.asarray([scale, soft_cap or 0.0], jnp.float32)
    tokens_together = 1 if max_query_len == 1 else max(1, QUERIES_TOGETHER // q_per_kv)
    parts = jnp.arange(0, tokens, tokens_together, dtype=jnp.int32)
    layers = jnp.asarray(layer, jnp.int32)[None]
    values = jax.ShapeDtypeStruct((*queries.shape[:3], held.value_width), jnp.float32)
    call = jax.ffi.ffi_call(target(), values)
    out = call(queries, view, layers, block_tables, seq, first, stop, shares, scale_and_cap, parts)
    return out[..., : value_dim or head_dim].astype(q.dtype)
