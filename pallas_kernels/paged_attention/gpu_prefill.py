"""Attends from sequences with several query tokens, in Triton: a tile of queries against all their keys.

Memory. The pool's view, the block tables and the queries stay in global memory. A program loads its queries once,
[ROWS, WIDTH], and keeps them in registers with the maximum and sum of each row, [ROWS], and the weighted values,
[ROWS, WIDTH], in float32. `attend` brings K and V through shared memory, [KEYS, WIDTH] each at a time. A program writes
its rows of the output once, at the end; no other program writes them.

Loops. The grid is (tiles, KV heads); a tile is TILE neighbouring queries of one sequence, and all GROUP query heads of
the KV head, so that each K and V brought in serves TILE * GROUP rows. Inside: the keys that the tile sees, in two
loops. The first covers keys that all queries see, without a mask; the second covers the rest, with one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.paged_attention.gpu_softmax import LOG2E, attend, first_key, product_dtype, values_of_view


@triton.jit
def attend_to_tiles(
    q,
    view,
    layer,
    tables,
    query_starts,
    kv_lens,
    sinks,
    last_keys,
    out,
    seqs,
    out_again,
    SEQ_LANES: tl.constexpr,
    PAGES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    FLOAT8: tl.constexpr,
    KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    BEHIND: tl.constexpr,
):
    """Program (t, head) writes TILE queries of one sequence for the query heads of one KV head.

    Row r of its products is query ``r // GROUP`` and query head ``r % GROUP``. The last tiles, which have the most
    keys, start first, so that no long program is left for the end. BEHIND: each query sees keys up to its `last_keys`;
    otherwise `last_keys` is not read, and each query sees keys up to its own.
    """
    # The grid is an upper bound, as the host does not know the lengths. Each program finds its tile from the sequences'
    # cumulative numbers of tiles, one sequence a lane; sequences of one query have none and are `gpu_decode`'s.
    every = tl.arange(0, SEQ_LANES)
    starts = tl.load(query_starts + every, mask=every < seqs, other=0)
    lengths = tl.load(query_starts + every + 1, mask=every < seqs, other=0) - starts
    ends = tl.cumsum(tl.where(lengths > 1, (lengths + TILE - 1) // TILE, 0), 0)
    tile = tl.max(ends, 0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    if tile >= 0:
        # The tile's sequence is the first whose tiles end after it; `offset` is the tile's first query within it.
        before = ends <= tile
        seq = tl.sum(before.to(tl.int32), 0)
        offset = (tile - tl.max(tl.where(before, ends, 0), 0)) * TILE
        first_token = tl.load(query_starts + seq)
        length = tl.load(query_starts + seq + 1) - first_token
        kv_len = tl.load(kv_lens + seq)
        dtype: tl.constexpr = product_dtype(q, view)
        row = tl.arange(0, ROWS)
        lane = tl.arange(0, WIDTH)
        # ROWS is a power of two, so a tile may have more rows than TILE * GROUP; `mine` leaves them out.
        nth = offset + row // GROUP
        mine = (row < TILE * GROUP) & (nth < length)
        at = (((first_token + nth).to(tl.int64) * HEADS + head) * GROUP + row % GROUP) * HEAD_DIM
        at = at[:, None] + lane[None, :]
        inside = mine[:, None] & (lane < HEAD_DIM)[None, :]
        queries = tl.load(q + at, mask=inside, other=0.0).to(dtype)
        query = kv_len - length + nth
        head_rows = values_of_view(view, FLOAT8) + (tl.load(layer).to(tl.int64) * HEADS + head) * (
            2 * WIDTH * BLOCK_ROWS
        )
        table = tables + seq * PAGES

        # The sink, a key without a value, is the first thing seen.
        top = tl.load(sinks + head * GROUP + row % GROUP) * LOG2E
        total = tl.full([ROWS], 1.0, tl.float32)
        values = tl.zeros([ROWS, WIDTH], tl.float32)
        begin = kv_len - length + offset
        # `begin` is the position of the tile's first query. No query sees a key from `stop` on, nor before `lowest`.
        last = query
        stop = begin + TILE
        if BEHIND:
            last = tl.load(last_keys + first_token + nth, mask=mine, other=0)
            stop = tl.maximum(stop, tl.max(last, 0) + 1)
        stop = tl.minimum(stop, tl.minimum(kv_len, PAGES * BLOCK_SIZE))
        lowest = first_key(begin, WINDOW, CHUNK)
        start = lowest // KEYS * KEYS
        if WINDOW is None and CHUNK is None:
            # Every query of the tile sees all keys before `begin`. Without a mask per query those cost less arithmetic.
            diagonal = tl.minimum(begin, stop) // KEYS * KEYS
            top, total, values = attend(
                top,
                total,
                values,
                queries,
                head_rows,
                table,
                start,
                diagonal,
                lowest,
                query,
                last,
                BLOCKS,
                BLOCK_STRIDE,
                BLOCK_SIZE,
                BLOCK_ROWS,
                WIDTH,
                KEYS,
                False,
                SCALE,
                SOFT_CAP,
                WINDOW,
                CHUNK,
            )
            start = diagonal
        top, total, values = attend(
            top,
            total,
            values,
            queries,
            head_rows,
            table,
            start,
            stop,
            lowest,
            query,
            last,
            BLOCKS,
            BLOCK_STRIDE,
            BLOCK_SIZE,
            BLOCK_ROWS,
            WIDTH,
            KEYS,
            True,
            SCALE,
            SOFT_CAP,
            WINDOW,
            CHUNK,
        )
        values = values / tl.where(total > 0, total, 1.0)[:, None]  # a query that sees nothing gives 0
        tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)
