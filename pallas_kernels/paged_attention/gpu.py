"""Implements paged_attention as Triton kernels: flash-decoding for single tokens, tiles of queries for longer runs.

A batch of decodes takes two launches, the units and their join. A mixed batch takes a third, over the sequences
with several query tokens. The launches write disjoint rows of one output, in place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gpu_launch import Launch, Launcher, has_float8, has_matrix_units, like, triton_call
from pallas_kernels.kv_codes import tokens_of
from pallas_kernels.layout import padded_head_dim
from pallas_kernels.paged_attention import gpu_shapes as shapes
from pallas_kernels.paged_attention.gpu_decode import attend_to_units, join_units
from pallas_kernels.paged_attention.gpu_prefill import attend_to_tiles
from pallas_kernels.paged_attention.gpu_shapes import measured_tiles
from pallas_kernels.paged_attention.reference import AttentionCall


def paged_attention(
    call: AttentionCall, *, launch: Launcher = triton_call
) -> Float[Array, "tokens kv_heads q_per_kv head_dim"]:
    """See `pallas_kernels.paged_attention.paged_attention`; rows that are key and value at once are not taken.

    Raises:
        ValueError: when heads are wider than `gpu_shapes.MAX_WIDTH`.
    """
    q, view, block_tables, kv_lens, sinks = call.q, call.view, call.block_tables, call.kv_lens, call.sinks
    assert call.value_dim is None, "`pallas_kernels.latent_attention.gpu` takes latents"
    tokens, kv_heads, group, head_dim = q.shape
    width = padded_head_dim(head_dim)
    if width > shapes.MAX_WIDTH:
        raise ValueError(f"head_dim={head_dim} is more than {shapes.MAX_WIDTH}, the widest the GPU kernels take")
    seqs = len(kv_lens)
    constants = {
        "SEQ_LANES": shapes.seq_lanes(seqs),
        "PAGES": block_tables.shape[1],
        "HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCKS": view.shape[0],
        "BLOCK_STRIDE": view.size // view.shape[0],
        "BLOCK_SIZE": tokens_of(view),
        "BLOCK_ROWS": view.shape[4],
        "WIDTH": width,
        "FLOAT8": view.dtype == jnp.uint8 and has_float8(),
        "SCALE": float(call.scale),
        "SOFT_CAP": call.soft_cap,
        "WINDOW": call.sliding_window,
        "CHUNK": call.chunk_size,
    }
    at = jnp.asarray(call.layer, jnp.int32)[None]
    arrays = (q, view, at, *(x.astype(jnp.int32) for x in (block_tables, call.query_starts, kv_lens)))
    # A sink of -inf takes no share.
    shares = jnp.full((kv_heads, group), -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    out = _decode(arrays, shares, constants, launch)
    longest = min(tokens, call.max_query_len or tokens)
    if longest == 1:
        return out
    # A kernel that reads no last keys still has the argument, so it gets another array.
    last = arrays[-1] if call.last_keys is None else call.last_keys.astype(jnp.int32)
    constants["BEHIND"] = call.last_keys is not None
    return _prefill(out, arrays, (shares, last), constants, longest, launch)


def _decode(arrays: tuple[Array, ...], sinks: Array, constants: dict[str, Any], launch: Launcher) -> Array:
    """Return the rows of the sequences that have one query token, and zeros in the rows of no sequence."""
    q, view, _, tables, query_starts, kv_lens = arrays
    tokens, kv_heads, group, _ = q.shape
    seqs, pages = tables.shape
    capacity = pages * constants["BLOCK_SIZE"]
    limits = [limit for limit in (constants["WINDOW"], constants["CHUNK"]) if limit is not None]
    span = min([capacity, *limits])
    unit = shapes.decode_unit(seqs, span)
    most = seqs * (-(-span // unit) + (span < capacity))  # a range that starts anywhere touches one unit more
    itemsize = max(q.dtype.itemsize, view.dtype.itemsize)
    rules = shapes.decode_tiles(group, constants["WIDTH"], itemsize, matrix_units=has_matrix_units())
    tiles = measured_tiles("decode", group, constants["WIDTH"], itemsize, rules)
    statistic = jax.ShapeDtypeStruct((most, kv_heads, group), jnp.float32)
    units = Launch(
        attend_to_units,
        grid=(min(most, max(1, shapes.PROGRAMS // kv_heads)), kv_heads),
        out=(statistic, statistic, jax.ShapeDtypeStruct((*statistic.shape, constants["WIDTH"]), jnp.float32)),
        constants=constants | {"UNIT": unit, "ROWS": tiles.rows, "KEYS": tiles.keys},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    parts = launch(units, *arrays, seqs)
    shared = ("SEQ_LANES", "HEAD_DIM", "WIDTH", "WINDOW", "CHUNK")
    join = Launch(
        join_units,
        grid=(seqs, kv_heads * group),
        out=(like(q),),
        constants={name: constants[name] for name in shared}
        | {"CAPACITY": capacity, "QUERY_HEADS": kv_heads * group}
        | {"UNIT": unit, "JOINED": shapes.JOINED},
        num_warps=4,
    )
    (out,) = launch(join, *parts, query_starts, kv_lens, sinks, seqs, tokens)
    return out


def _prefill(
    out: Array,
    arrays: tuple[Array, ...],
    more: tuple[Array, Array],
    constants: dict[str, Any],
    longest: int,
    launch: Launcher,
) -> Array:
    """Return `out` with the rows of the sequences that have several query tokens; `more` are sinks and last keys."""
    q, view, *_, kv_lens = arrays
    tokens, kv_heads, group, _ = q.shape
    seqs = len(kv_lens)
    itemsize = max(q.dtype.itemsize, view.dtype.itemsize)
    options = {"in_bytes": view.dtype.itemsize == 1, "matrix_units": has_matrix_units()}
    rules = shapes.prefill_tiles(group, constants["WIDTH"], itemsize, longest, **options)
    tiles = measured_tiles("prefill", group, constants["WIDTH"], itemsize, rules)
    tile = tiles.rows // group
    prefill = Launch(
        attend_to_tiles,
        grid=(tokens // tile + min(seqs, tokens // 2), kv_heads),
        out=(like(out),),
        aliases={8: 0},
        constants=constants | {"TILE": tile, "ROWS": tiles.rows, "KEYS": tiles.keys},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    (out,) = launch(prefill, *arrays, *more, out, seqs)
    return out
