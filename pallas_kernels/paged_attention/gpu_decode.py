"""Triton: decode attention, one query token a sequence (flash-decoding: split over keys, then join).

`attend_to_units` computes units, each a fixed range of one sequence's keys for all query heads of one KV head,
packed as rows of one product. `join_units` joins a sequence's units by their softmax statistics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.paged_attention.gpu_softmax import attend, common_dtype, first_key


@triton.jit
def attend_to_units(
    q,
    view,
    layer,
    tables,
    query_starts,
    kv_lens,
    unit_seq,
    unit_key,
    num_units,
    tops,
    totals,
    values_of,
    PAGES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Statistics of every live unit; program (p, head) takes units p, p + programs, ...

    Writes tops, totals [units, HEADS, GROUP] and values_of [units, HEADS, GROUP, WIDTH], float32.
    """
    dtype: tl.constexpr = common_dtype(q, view)
    head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)
    head_rows = view + (tl.load(layer).to(tl.int64) * HEADS + head) * (2 * WIDTH * BLOCK_SIZE)
    for unit in range(tl.program_id(0), tl.load(num_units), tl.num_programs(0)):
        seq = tl.load(unit_seq + unit)
        start = tl.load(unit_key + unit)
        kv_len = tl.load(kv_lens + seq)
        lowest = first_key(kv_len - 1, WINDOW, CHUNK)
        stop = tl.minimum(start + UNIT, tl.minimum(kv_len, PAGES * BLOCK_SIZE))
        token = tl.load(query_starts + seq + 1).to(tl.int64) - 1
        mine = q + (token * HEADS + head) * (GROUP * HEAD_DIM) + row[:, None] * HEAD_DIM + lane[None, :]
        queries = tl.load(mine, mask=(row < GROUP)[:, None] & (lane < HEAD_DIM)[None, :], other=0.0).to(dtype)
        top, total, values = attend(
            tl.full([ROWS], float("-inf"), tl.float32),
            tl.zeros([ROWS], tl.float32),
            tl.zeros([ROWS, WIDTH], tl.float32),
            queries,
            head_rows,
            tables + seq * PAGES,
            tl.maximum(start, lowest // KEYS * KEYS),
            stop,
            lowest,
            row,
            BLOCKS,
            BLOCK_STRIDE,
            BLOCK_SIZE,
            WIDTH,
            KEYS,
            False,
            SCALE,
            SOFT_CAP,
            WINDOW,
            CHUNK,
        )
        at = (unit * HEADS + head) * GROUP + row
        tl.store(tops + at, top, mask=row < GROUP)
        tl.store(totals + at, total, mask=row < GROUP)
        tl.store(values_of + at[:, None] * WIDTH + lane[None, :], values, mask=(row < GROUP)[:, None])


@triton.jit
def join_units(
    tops,
    totals,
    values_of,
    seq_units,
    query_starts,
    out,
    out_again,
    QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Program (s, h) writes query head h's row of sequence s from its units, UNITS at a time."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(seq_units + seq)
    last = tl.load(seq_units + seq + 1)
    lane = tl.arange(0, WIDTH)
    if first < last:
        top = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        values = tl.zeros([WIDTH], tl.float32)
        for start in range(first, last, UNITS):
            unit = start + tl.arange(0, UNITS)
            live = unit < last
            at = unit * QUERY_HEADS + head
            unit_top = tl.load(tops + at, mask=live, other=float("-inf"))
            new_top = tl.maximum(top, tl.max(unit_top, 0))
            finite = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(unit_top - finite)
            keep = tl.exp2(top - finite)
            total = total * keep + tl.sum(weight * tl.load(totals + at, mask=live, other=0.0), 0)
            unit_values = tl.load(values_of + at[:, None] * WIDTH + lane[None, :], mask=live[:, None], other=0.0)
            values = values * keep + tl.sum(weight[:, None] * unit_values, 0)
            top = new_top
        token = tl.load(query_starts + seq + 1).to(tl.int64) - 1
        values = values / tl.where(total > 0, total, 1.0)  # a query that sees nothing gives 0
        place = out + (token * QUERY_HEADS + head) * HEAD_DIM + lane
        tl.store(place, values.to(out.dtype.element_ty), mask=lane < HEAD_DIM)
