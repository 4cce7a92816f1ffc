"""Attends to latents in Triton, each read once as key and as value: units of a decode, and tiles of a prompt's queries.

Units are those of `pallas_kernels.paged_attention.gpu_decode`, whose `join_units` joins them. A row is VALUE_LANES
lanes of latent, powers of two of whole tiles, and REST_LANES more of a key, which may be none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.gpu_codes import read_rows
from pallas_kernels.paged_attention.gpu_decode import units_of
from pallas_kernels.paged_attention.gpu_softmax import LOG2E, product_dtype, values_of_view


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
