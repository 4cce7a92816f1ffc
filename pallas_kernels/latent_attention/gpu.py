"""Implements latent attention as Triton kernels: flash-decoding for single tokens, tiles of queries for longer runs.

They are launched as those of `pallas_kernels.paged_attention.gpu` are. A program keeps its values, `ROWS` rows of the
latent's width, in registers, and reads each latent once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu_launch import Launch, Launcher, has_float8, like, triton_call
from pallas_kernels.kv_codes import tokens_of
from pallas_kernels.latent_attention.gpu_kernels import attend_to_latents, attend_to_latents_of_tiles
from pallas_kernels.latent_attention.gpu_shapes import MAX_PROMPT_ROWS, ROWS, keys_of_product
from pallas_kernels.layout import LANES, latent_tiles
from pallas_kernels.paged_attention import gpu_shapes as shapes
from pallas_kernels.paged_attention.gpu_decode import join_units


def latent_attention(
    q: Float[Array, "tokens heads width"],
    view: Float[Array, "blocks layers 1 tiles block_size 128"],
    layer: int | Int[Array, ""],
    block_tables: Int[Array, "seqs pages"],
    query_starts: Int[Array, " seqs+1"],
    kv_lens: Int[Array, " seqs"],
    *,
    rank: int,
    scale: float,
    max_query_len: int | None = None,
    launch: Launcher = triton_call,
) -> Float[Array, "tokens heads rank"]:
    """See `pallas_kernels.latent_attention.latent_attention`; `gpu_shapes.takes` says for which shapes."""
    tokens, heads, width = q.shape
    blocks, _, _, tiles, block_rows, _ = view.shape
    constants = {
        "SEQ_LANES": shapes.seq_lanes(len(kv_lens)),
        "PAGES": block_tables.shape[1],
        "HEADS": heads,
        "KEY_DIM": width,
        "BLOCKS": blocks,
        "BLOCK_STRIDE": view.size // blocks,
        "LAYER_STRIDE": tiles * block_rows * LANES,
        "BLOCK_SIZE": tokens_of(view),
        "BLOCK_ROWS": block_rows,
        "VALUE_LANES": latent_tiles(rank) * LANES,
        "REST_LANES": (tiles - latent_tiles(rank)) * LANES,
        "FLOAT8": view.dtype == jnp.uint8 and has_float8(),
        "SCALE": float(scale),
        "KEYS": keys_of_product(max(q.dtype.itemsize, view.dtype.itemsize)),
    }
    at = jnp.asarray(layer, jnp.int32)[None]
    arrays = (q, view, at, *(x.astype(jnp.int32) for x in (block_tables, query_starts, kv_lens)))
    out = _decode(arrays, rank, constants, launch)
    longest = min(tokens, max_query_len or tokens)
    return out if longest == 1 else _prefill(out, arrays, constants, launch)


def _decode(arrays: tuple[Array, ...], rank: int, constants: dict[str, Any], launch: Launcher) -> Array:
    """Return the rows of the sequences that have one query token, and zeros in the rows of no sequence."""
    q, _, _, tables, query_starts, kv_lens = arrays
    tokens, heads, _ = q.shape
    seqs, pages = tables.shape
    capacity = pages * constants["BLOCK_SIZE"]
    unit = shapes.decode_unit(seqs, capacity)
    most, head_tiles = seqs * -(-capacity // unit), -(-heads // ROWS)
    statistic = jax.ShapeDtypeStruct((most, heads), jnp.float32)
    units = Launch(
        attend_to_latents,
        grid=(min(most, max(1, shapes.PROGRAMS // head_tiles)), head_tiles),
        out=(statistic, statistic, jax.ShapeDtypeStruct((most, heads, constants["VALUE_LANES"]), jnp.float32)),
        constants=constants | {"UNIT": unit, "ROWS": ROWS},
        num_warps=8,
        num_stages=2,
    )
    parts = launch(units, *arrays, seqs)
    join = Launch(
        join_units,
        grid=(seqs, heads),
        out=(jax.ShapeDtypeStruct((tokens, heads, rank), q.dtype),),
        constants={
            "SEQ_LANES": constants["SEQ_LANES"],
            "CAPACITY": capacity,
            "QUERY_HEADS": heads,
            "HEAD_DIM": rank,
            "WIDTH": constants["VALUE_LANES"],
            "UNIT": unit,
            "JOINED": shapes.JOINED,
            "WINDOW": None,
            "CHUNK": None,
        },
        num_warps=4,
    )
    no_sinks = jnp.full((heads,), -jnp.inf, jnp.float32)
    (out,) = launch(join, *parts, query_starts, kv_lens, no_sinks, seqs, tokens)
    return out


def _prefill(out: Array, arrays: tuple[Array, ...], constants: dict[str, Any], launch: Launcher) -> Array:
    """Return `out` with the rows of the sequences that have several query tokens."""
    q, seqs = arrays[0], len(arrays[-1])
    tokens, heads, _ = q.shape
    tile_heads = min(ROWS, 1 << (heads - 1).bit_length())
    rows = MAX_PROMPT_ROWS if q.dtype.itemsize == 2 else ROWS
    tile = rows // tile_heads
    prefill = Launch(
        attend_to_latents_of_tiles,
        grid=(tokens // tile + min(seqs, tokens // 2), -(-heads // tile_heads)),
        out=(like(out),),
        aliases={6: 0},
        constants=constants | {"RANK": out.shape[2], "TILE": tile, "TILE_HEADS": tile_heads},
        num_warps=8 if rows > ROWS else 4,
        num_stages=2,
    )
    (out,) = launch(prefill, *arrays, out, seqs)
    return out
