"""Implements latent attention as Triton kernels: flash-decoding for single tokens, tiles of queries for longer runs.

Memory. The view and the tables stay in global memory. A row of the view is one latent, VALUE_LANES lanes, and
REST_LANES more of a key, which may be none. All heads read the same rows, so a program's products have heads as rows
(ROWS of them for a decode, queries and heads together for a prompt). A turn brings KEYS latents through shared memory
to the matrix units, where they serve twice: as keys of the scores, and as values. In registers stay the queries,
[ROWS, VALUE_LANES + REST_LANES], and the softmax in float32: maxima and sums, [ROWS], and values, [ROWS, VALUE_LANES].

    scores = q . latent^T + q_rest . rest^T        [ROWS, KEYS]
    values = weights . latent                      [ROWS, VALUE_LANES]

Loops. Units of a decode are those of `pallas_kernels.paged_attention.gpu_decode`: a fixed grid takes them in turns,
statistics go to global memory, and a second launch, `join_units`, joins them. A prompt's grid is (tiles of queries,
heads / TILE_HEADS). Inside: turns of KEYS keys; the next turn's block ids are loaded one turn ahead. The prompt's
launch takes the decode's result as donated output and writes only its own rows.

Shapes were chosen by reasoning, from the shared memory and registers that the compiler reports, and have not been
tuned on a GPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu_codes import read_rows
from pallas_kernels.gpu_launch import Launch, Launcher, has_float8, like, triton_call
from pallas_kernels.kv_codes import tokens_of
from pallas_kernels.layout import LANES, latent_tiles
from pallas_kernels.paged_attention import gpu_shapes as shapes
from pallas_kernels.paged_attention.gpu_decode import join_units, units_of
from pallas_kernels.paged_attention.gpu_softmax import LOG2E, product_dtype, values_of_view

ROWS = 16
"""Heads of a decode's product, and (query, head) pairs of a prompt's: the fewest that tensor cores take."""
MAX_PROMPT_ROWS = 32


@triton.jit
def attend_to_latents(
    q,
    view,
    layer,
    tables,
    query_starts,
    kv_lens,
    seqs,
    tops,
    totals,
    values_of,
    SEQ_LANES: tl.constexpr,
    PAGES: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    FLOAT8: tl.constexpr,
    SCALE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Compute the statistics of every unit; program (p, t) takes units p, p + programs, ... for ROWS heads.

    Writes tops, totals [units, HEADS] and values_of [units, HEADS, VALUE_LANES], float32.
    """
    dtype: tl.constexpr = product_dtype(q, view)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, VALUE_LANES)
    rows = values_of_view(view, FLOAT8) + tl.load(layer).to(tl.int64) * LAYER_STRIDE
    counts = units_of(query_starts, kv_lens, seqs, SEQ_LANES, PAGES * BLOCK_SIZE, UNIT, None, None)
    ends = tl.cumsum(counts, 0)
    for unit in range(tl.program_id(0), tl.sum(counts, 0), tl.num_programs(0)):
        before = ends <= unit
        seq = tl.sum(before.to(tl.int32), 0)
        start = (unit - tl.max(tl.where(before, ends, 0), 0)) * UNIT
        stop = tl.minimum(start + UNIT, tl.minimum(tl.load(kv_lens + seq), PAGES * BLOCK_SIZE))
        token = tl.load(query_starts + seq).to(tl.int64)
        place, mine = q + (token * HEADS + head) * KEY_DIM, head < HEADS
        queries = lanes_of(place, mine, 0, KEY_DIM, VALUE_LANES).to(dtype)
        rest = queries
        if REST_LANES > 0:
            rest = lanes_of(place, mine, VALUE_LANES, KEY_DIM, REST_LANES).to(dtype)
        top, total, values = attend(
            tl.full([ROWS], float("-inf"), tl.float32),
            tl.zeros([ROWS], tl.float32),
            tl.zeros([ROWS, VALUE_LANES], tl.float32),
            queries,
            rest,
            rows,
            tables + seq * PAGES,
            start,
            stop,
            head,
            BLOCKS,
            BLOCK_STRIDE,
            BLOCK_SIZE,
            BLOCK_ROWS,
            VALUE_LANES,
            REST_LANES,
            KEYS,
            False,
            SCALE,
        )
        at = unit * HEADS + head
        tl.store(tops + at, top, mask=mine)
        tl.store(totals + at, total, mask=mine)
        tl.store(values_of + at[:, None] * VALUE_LANES + lane[None, :], values, mask=mine[:, None])


@triton.jit
def attend_to_latents_of_tiles(
    q,
    view,
    layer,
    tables,
    query_starts,
    kv_lens,
    out,
    seqs,
    out_again,
    SEQ_LANES: tl.constexpr,
    PAGES: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    FLOAT8: tl.constexpr,
    SCALE: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Program (t, h) writes TILE queries of one sequence for TILE_HEADS heads; row r of its products is query
    ``r // TILE_HEADS`` and head ``r % TILE_HEADS`` of them. The last tiles, which have the most keys, start first."""
    every = tl.arange(0, SEQ_LANES)
    starts = tl.load(query_starts + every, mask=every < seqs, other=0)
    lengths = tl.load(query_starts + every + 1, mask=every < seqs, other=0) - starts
    ends = tl.cumsum(tl.where(lengths > 1, (lengths + TILE - 1) // TILE, 0), 0)
    tile = tl.max(ends, 0) - 1 - tl.program_id(0)
    if tile >= 0:
        before = ends <= tile
        seq = tl.sum(before.to(tl.int32), 0)
        offset = (tile - tl.max(tl.where(before, ends, 0), 0)) * TILE
        first_token = tl.load(query_starts + seq)
        length = tl.load(query_starts + seq + 1) - first_token
        kv_len = tl.load(kv_lens + seq)
        dtype: tl.constexpr = product_dtype(q, view)
        row = tl.arange(0, TILE * TILE_HEADS)
        nth, head = offset + row // TILE_HEADS, tl.program_id(1) * TILE_HEADS + row % TILE_HEADS
        mine = (nth < length) & (head < HEADS)
        token_head = (first_token + nth).to(tl.int64) * HEADS + head
        place = q + token_head * KEY_DIM
        queries = lanes_of(place, mine, 0, KEY_DIM, VALUE_LANES).to(dtype)
        rest = queries
        if REST_LANES > 0:
            rest = lanes_of(place, mine, VALUE_LANES, KEY_DIM, REST_LANES).to(dtype)
        query = kv_len - length + nth
        top = tl.full([TILE * TILE_HEADS], float("-inf"), tl.float32)
        total = tl.zeros([TILE * TILE_HEADS], tl.float32)
        values = tl.zeros([TILE * TILE_HEADS, VALUE_LANES], tl.float32)
        begin = kv_len - length + offset
        stop = tl.minimum(begin + TILE, tl.minimum(kv_len, PAGES * BLOCK_SIZE))
        top, total, values = attend(
            top,
            total,
            values,
            queries,
            rest,
            values_of_view(view, FLOAT8) + tl.load(layer).to(tl.int64) * LAYER_STRIDE,
            tables + seq * PAGES,
            0,
            stop,
            query,
            BLOCKS,
            BLOCK_STRIDE,
            BLOCK_SIZE,
            BLOCK_ROWS,
            VALUE_LANES,
            REST_LANES,
            KEYS,
            True,
            SCALE,
        )
        values = values / tl.where(total > 0, total, 1.0)[:, None]  # a query that sees nothing gives 0
        lane = tl.arange(0, VALUE_LANES)
        inside = mine[:, None] & (lane < RANK)[None, :]
        tl.store(out + token_head[:, None] * RANK + lane[None, :], values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def lanes_of(place, mine, FIRST: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Read LANES lanes from FIRST on of rows of WIDTH; 0 where there is none, or the row is not `mine`."""
    lane = FIRST + tl.arange(0, LANES)
    return tl.load(place[:, None] + lane[None, :], mask=mine[:, None] & (lane < WIDTH)[None, :], other=0.0)


@triton.jit
def attend(
    top,
    total,
    values,
    q,
    q_rest,
    rows,
    table,
    start,
    stop,
    query,
    BLOCKS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    KEYS: tl.constexpr,
    PER_QUERY: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Return the softmax statistics of some queries after the keys at positions ``start <= k < stop``; see
    `pallas_kernels.paged_attention.gpu_softmax.attend`. q and q_rest are the two parts of the queries, `rows` a pointer
    to block 0's rows of this layer."""
    key = start + tl.arange(0, KEYS)
    block = tl.load(table + key // BLOCK_SIZE, mask=key < stop, other=-1)
    for _ in range(start, stop, KEYS):
        known = (block >= 0) & (block < BLOCKS)
        home = rows + tl.where(known, block, 0).to(tl.int64) * BLOCK_STRIDE
        row = home + key % BLOCK_SIZE * 128
        scales = home + BLOCK_SIZE * 128 + key % BLOCK_SIZE * 4
        # Read one turn ahead: the next rows' addresses are then known in time to start their copies.
        ahead = key + KEYS
        next_block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < stop, other=-1)
        latent = read_rows(row, scales, known, q.dtype, 0, BLOCK_ROWS, VALUE_LANES)
        scores = tl.dot(q, tl.trans(latent), input_precision="tf32x3")
        if REST_LANES > 0:
            rest = read_rows(row, scales, known, q.dtype, VALUE_LANES, BLOCK_ROWS, REST_LANES)
            scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision="tf32x3")
        seen = known[None, :]
        if PER_QUERY:
            seen = seen & (key[None, :] <= query[:, None])
        scores = tl.where(seen, scores * (SCALE * LOG2E), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - finite[:, None])
        keep = tl.exp2(top - finite)
        total = total * keep + tl.sum(weights, 1)
        values = tl.dot(weights.to(q.dtype), latent, values * keep[:, None], input_precision="tf32x3")
        top = new_top
        key += KEYS
        block = next_block
    return top, total, values


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
    """See `pallas_kernels.latent_attention.latent_attention`; `gpu_takes` says for which shapes."""
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
        "KEYS": _keys_of_product(max(q.dtype.itemsize, view.dtype.itemsize)),
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


def _keys_of_product(itemsize: int) -> int:
    """Return how many keys a product has: so few that two turns' latents fit the shared memory of every GPU."""
    return 32 if itemsize == 2 else 16
