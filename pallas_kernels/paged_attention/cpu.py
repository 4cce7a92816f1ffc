"""paged_attention for CPUs: loops that read the pool in place, compiled by Numba, called by XLA.

XLA:CPU has to gather K and V into arrays of their own before it multiplies; here each cached token is read from where
it lies. One custom call a layer, shared by XLA's threads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import padded_head_dim
from pallas_kernels.paged_attention.reach import Reach


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
    max_query_len: int | None = None,
) -> Float[Array, "tokens kv_heads q_per_kv head_dim"]:
    """See `pallas_kernels.paged_attention.paged_attention`; the view is float32."""
    from pallas_kernels.paged_attention import cpu_decode, cpu_prefill  # need Numba

    tokens, _, q_per_kv, head_dim = q.shape
    width = padded_head_dim(head_dim)
    queries = jnp.pad(q.astype(jnp.float32) * scale, ((0, 0), (0, 0), (0, 0), (0, width - head_dim)))
    token = jnp.arange(tokens)
    seq = jnp.minimum((token[:, None] >= query_starts[1:]).sum(axis=1), len(kv_lens) - 1)
    position = kv_lens[seq] - query_starts[seq + 1] + token
    first = Reach(sliding_window, chunk_size).first_key(position)
    stop = jnp.where(token < query_starts[-1], position + 1, 0)

    def call(target: str, stop: Array, *more: Array) -> Array:
        rows = [x.astype(jnp.int32) for x in (seq, first, stop, *more)]
        compiled = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(queries.shape, jnp.float32))
        return compiled(queries, view, jnp.asarray(layer, jnp.int32)[None], block_tables, *rows)

    shape = (q_per_kv, view.shape[3], soft_cap)
    if max_query_len == 1:
        out = call(cpu_decode.target(*shape), stop)
    else:
        several = jnp.diff(query_starts)[seq] > 1
        decoded = call(cpu_decode.target(*shape), jnp.where(several, 0, stop))
        tiles = call(cpu_prefill.target(*shape), jnp.where(several, stop, 0), token - query_starts[seq])
        out = jnp.where((several & (stop > 0))[:, None, None, None], tiles, decoded)
    return out[..., :head_dim].astype(q.dtype)
