"""Implements paged_attention for CPUs: loops that read the pool in place, compiled by Numba, called by XLA.

XLA:CPU has to gather K and V into new arrays before it multiplies; these loops read each cached token from its place in
the pool. There is one custom call per layer, whose work XLA's threads share.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.cpu_cores import num_cores
from pallas_kernels.custom_calls import target
from pallas_kernels.kv_codes import scale_strides, tokens_of
from pallas_kernels.layout import KVTiles
from pallas_kernels.paged_attention.reference import AttentionCall

QUERIES_TOGETHER, FEW_TOGETHER = 192, 48
"""Most queries of neighbouring tokens that share the keys brought into the cache: `QUERIES_TOGETHER`, but down to
`FEW_TOGETHER` where cores would have no work."""
ITEMS_OF_CORE = 4
DTYPES = ("float32", "bfloat16", "uint16", "int8", "uint8")
"""Views that are read here; uint8 holds float8 and uint16 bfloat16, see `pallas_kernels.kv_codes`."""


SPLIT = 1024
"""Keys of a split, doubled until a context has at most `MOST_SPLITS` splits."""
MOST_SPLITS = 16
NO_SINK = np.float32(-1e29)
"""Below every score of a key that is seen, but so far above that of a hidden key that its weight is 0."""


def most_splits(keys: int) -> int:
    """Return the most splits that a context of up to `keys` keys may have."""
    return min(MOST_SPLITS, -(-keys // SPLIT))


def paged_attention(call: AttentionCall) -> Float[Array, "tokens kv_heads q_per_kv value_dim"]:
    """See `pallas_kernels.paged_attention.paged_attention`; the view has one of `DTYPES`."""
    q, view, query_starts, kv_lens, value_dim = call.q, call.view, call.query_starts, call.kv_lens, call.value_dim
    tokens, kv_heads, q_per_kv, head_dim = q.shape
    held, block_size = KVTiles.of(view.shape[3], value_dim), tokens_of(view)
    queries = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, 0), (0, 0), (0, held.key_width - head_dim)))
    token = jnp.arange(tokens, dtype=jnp.int32)
    seq = jnp.minimum((token[:, None] >= query_starts[1:]).sum(axis=1, dtype=jnp.int32), len(kv_lens) - 1)
    position = kv_lens[seq] - query_starts[seq + 1] + token
    first = call.reach.first_key(position)
    last = position if call.last_keys is None else call.last_keys.astype(jnp.int32)
    stop = jnp.where(token < query_starts[-1], last + 1, 0)
    shares = jnp.full((kv_heads, q_per_kv), NO_SINK) if call.sinks is None else call.sinks.astype(jnp.float32)
    scale_and_cap = jnp.asarray([call.scale, call.soft_cap or 0.0], jnp.float32)
    is_decode = call.max_query_len == 1
    parts = jnp.arange(0, tokens, 1 if is_decode else _tokens_together(*q.shape[:3]), dtype=jnp.int32)
    splits = most_splits(call.block_tables.shape[1] * block_size) if is_decode else 1
    places = tokens if splits > 1 else 1
    settings = jnp.stack([jnp.asarray(n, jnp.int32) for n in (call.layer, block_size, *scale_strides(view))])
    results = (
        jax.ShapeDtypeStruct((*queries.shape[:3], held.value_width), jnp.float32),
        jax.ShapeDtypeStruct((places, kv_heads, splits, q_per_kv, held.value_width + 2), jnp.float32),
        jax.ShapeDtypeStruct((places * kv_heads, 2), jnp.int32),
    )
    attend = jax.ffi.ffi_call(
        target("paged_attention.cpu_call:target", view.dtype.name), results, input_output_aliases={11: 2}
    )
    arrays = (settings, call.block_tables, seq, first, stop, shares, scale_and_cap, parts, jnp.zeros(splits, jnp.int32))
    out, *_ = attend(queries, view, *arrays, jnp.zeros(results[2].shape, jnp.int32))
    return out[..., : value_dim or head_dim].astype(q.dtype)


def takes(view: jax.Array) -> bool:
    """Tell whether a view's dtype is read here."""
    return view.dtype.name in DTYPES


def _tokens_together(tokens: int, kv_heads: int, q_per_kv: int) -> int:
    """Return the number of neighbouring tokens of an item of work: enough to share the cost of loading their keys, but
    few enough that every core has items."""
    many = max(1, QUERIES_TOGETHER // q_per_kv)
    few = max(1, FEW_TOGETHER // q_per_kv)
    return min(many, max(few, tokens * kv_heads // (ITEMS_OF_CORE * num_cores())))
