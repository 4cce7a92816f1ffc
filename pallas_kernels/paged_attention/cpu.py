"""paged_attention for CPUs: loops that read the pool in place, compiled by Numba, called by XLA.

XLA:CPU has to gather K and V into arrays of their own before it multiplies; here each cached token is read from where
it lies. One custom call a layer, shared by XLA's threads. Chunks of long contexts run as XLA's matrix products.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import padded_head_dim
from pallas_kernels.paged_attention.reach import Reach
from pallas_kernels.paged_attention.xla import Problem, prefill

ROWS_UP_TO = 512
"""Cached tokens of a sequence whose queries are rows of their own. Products waste what a tile of queries and a span of
keys has beyond the causal triangle, which short sequences feel most."""


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
    max_query_len: int | None = None,
) -> Float[Array, "tokens kv_heads q_per_kv head_dim"]:
    """See `pallas_kernels.paged_attention.paged_attention`; the view is float32."""
    from pallas_kernels.paged_attention.cpu_kernel import target  # needs Numba
    from pallas_kernels.paged_attention.cpu_math import NEVER

    tokens, kv_heads, q_per_kv, head_dim = q.shape
    width = padded_head_dim(head_dim)
    queries = jnp.pad(q.astype(jnp.float32) * scale, ((0, 0), (0, 0), (0, 0), (0, width - head_dim)))
    layer = jnp.asarray(layer, jnp.int32)
    reach = Reach(sliding_window, chunk_size)
    token = jnp.arange(tokens)
    seq = jnp.minimum((token[:, None] >= query_starts[1:]).sum(axis=1), len(kv_lens) - 1)
    position = kv_lens[seq] - query_starts[seq + 1] + token
    lengths = jnp.diff(query_starts)
    by_products = (lengths > 1) & (kv_lens > ROWS_UP_TO) if max_query_len != 1 else jnp.zeros_like(lengths, bool)
    live = token < query_starts[-1]
    stop = jnp.where(live & ~by_products[seq], position + 1, 0)
    call = jax.ffi.ffi_call(target(q_per_kv, view.shape[3], soft_cap), jax.ShapeDtypeStruct(queries.shape, jnp.float32))
    rows = [x.astype(jnp.int32) for x in (seq, reach.first_key(position), stop)]
    shares = jnp.full((kv_heads, q_per_kv), NEVER) if sinks is None else sinks.astype(jnp.float32)
    out = call(queries, view, layer[None], block_tables, *rows, shares)
    if max_query_len != 1:
        problem = Problem(queries, view, layer, block_tables, kv_lens, soft_cap, reach, sinks)
        products = prefill(problem, query_starts, jnp.where(by_products, lengths, 0))
        out = jnp.where((live & by_products[seq])[:, None, None, None], products, out)
    return out[..., :head_dim].astype(q.dtype)
