"""Attends from one query token a sequence, in Triton (flash-decoding: split over keys, then join).

A *unit* is a fixed range of one sequence's keys, the positions ``i * UNIT`` up to ``(i + 1) * UNIT``, so a sequence
is cut alike in every batch. `attend_to_units` computes units, all query heads of a KV head packed as rows of one
product; `join_units` joins a sequence's units by their softmax statistics.

Memory.

    global     q [tokens, HEADS, GROUP, HEAD_DIM], view [blocks, layers, HEADS, tiles, BLOCK_ROWS, 128], int32 tables
               [seqs, PAGES]; float32 statistics: tops, totals [units, HEADS, GROUP] and values_of [units, HEADS,
               GROUP, WIDTH]. Statistics and output are written, the others read; nothing is donated
    registers  queries [ROWS, WIDTH], loaded once a unit; maximum and sum of each row, [ROWS], and weighted values,
               [ROWS, WIDTH], in float32, for the whole unit; scores [ROWS, KEYS] of a turn
    shared     K and V of a turn, [KEYS, WIDTH] each, times num_stages, on their way to the matrix units

    sequences    A: 2.5 units     B: 1     C: 1.2
    units        A0  A1  A2       B0       C0  C1        numbered through; `ends` = cumulative sums
    program p    takes units p, p + programs, ...        here with 4 programs: {A0, C0}, {A1, C1}, {A2}, {B0}

Loops. The grid is (programs, HEADS), whatever the batch. Outside: the units of all sequences, so that long sequences
do not leave most of the GPU idle. Inside (`gpu_softmax.attend`): the keys of a unit, KEYS a turn; their blocks are
looked up in the table one turn ahead. Programs wait for nothing. The second launch, with a grid of (sequences, query
heads), begins when the first has ended, and reads JOINED units' statistics at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.paged_attention.gpu_softmax import LOG2E, attend, first_key, product_dtype, values_of_view


@triton.jit
def units_of(
    query_starts,
    kv_lens,
    seqs,
    SEQ_LANES: tl.constexpr,
    CAPACITY: tl.constexpr,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the number of units of each sequence, [SEQ_LANES] int32; 0 unless it has exactly one query token."""
    # All sequences at once, one a lane: SEQ_LANES is the next power of two, as Triton's ranges must be.
    seq = tl.arange(0, SEQ_LANES)
    live = seq < seqs
    starts = tl.load(query_starts + seq, mask=live, other=0)
    one_query = tl.load(query_starts + seq + 1, mask=live, other=0) == starts + 1
    kv_len = tl.load(kv_lens + seq, mask=live, other=0)
    # Units that lie before a window's first key are never started; the first one may hold keys that are not seen.
    last = (tl.minimum(kv_len, CAPACITY) + UNIT - 1) // UNIT
    return tl.where(one_query, tl.maximum(last - first_key(kv_len - 1, WINDOW, CHUNK) // UNIT, 0), 0)


@triton.jit
def attend_to_units(
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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
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
):
    """Compute the statistics of every unit, sequence by sequence; program (p, head) takes units p, p + programs, ...

    Writes tops, totals [units, HEADS, GROUP] and values_of [units, HEADS, GROUP, WIDTH], float32.
    """
    dtype: tl.constexpr = product_dtype(q, view)
    head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)
    # The layer's and head's rows within a block; int64, as a pool may have more than 2 ** 31 numbers.
    head_rows = values_of_view(view, FLOAT8) + (tl.load(layer).to(tl.int64) * HEADS + head) * (2 * WIDTH * BLOCK_ROWS)
    counts = units_of(query_starts, kv_lens, seqs, SEQ_LANES, PAGES * BLOCK_SIZE, UNIT, WINDOW, CHUNK)
    ends = tl.cumsum(counts, 0)
    # The grid does not depend on the number of units, which the host does not know when it captures a launch: each
    # program takes every num_programs-th unit. Which program computes a unit changes no bit of it.
    for unit in range(tl.program_id(0), tl.sum(counts, 0), tl.num_programs(0)):
        # The unit's sequence is the first one whose units end after it: a search in registers, without memory.
        before = ends <= unit
        seq = tl.sum(before.to(tl.int32), 0)
        kv_len = tl.load(kv_lens + seq)
        lowest = first_key(kv_len - 1, WINDOW, CHUNK)
        # Units are counted from that of the first key seen. UNIT is a multiple of KEYS: `start` begins a tile of keys.
        start = (lowest // UNIT + unit - tl.max(tl.where(before, ends, 0), 0)) * UNIT
        stop = tl.minimum(start + UNIT, tl.minimum(kv_len, PAGES * BLOCK_SIZE))
        # The GROUP query heads that share this KV head are the rows of one product; ROWS is at least 16, which matrix
        # units take, so rows from GROUP on are zeros and are not stored.
        token = tl.load(query_starts + seq).to(tl.int64)
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
            row,
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
        # Not divided by the sums yet: `join_units` weighs units by their maxima and divides once.
        at = (unit * HEADS + head) * GROUP + row
        tl.store(tops + at, top, mask=row < GROUP)
        tl.store(totals + at, total, mask=row < GROUP)
        tl.store(values_of + at[:, None] * WIDTH + lane[None, :], values, mask=(row < GROUP)[:, None])


@triton.jit
def join_units(
    tops,
    totals,
    values_of,
    query_starts,
    kv_lens,
    sinks,
    seqs,
    tokens,
    out,
    SEQ_LANES: tl.constexpr,
    CAPACITY: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    JOINED: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (s, h) writes query head h's row of sequence s from its units, JOINED at a time.

    It also clears rows that belong to no sequence; those of sequences with several query tokens are left alone.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    lane = tl.arange(0, WIDTH)
    dtype: tl.constexpr = out.dtype.element_ty
    for token in range(tl.load(query_starts + seqs) + seq, tokens, seqs):
        tl.store(out + (token * QUERY_HEADS + head) * HEAD_DIM + lane, tl.zeros([WIDTH], dtype), mask=lane < HEAD_DIM)

    token = tl.load(query_starts + seq).to(tl.int64)
    if tl.load(query_starts + seq + 1) == token + 1:
        counts = units_of(query_starts, kv_lens, seqs, SEQ_LANES, CAPACITY, UNIT, WINDOW, CHUNK)
        owner = tl.arange(0, SEQ_LANES)
        first = tl.sum(tl.where(owner < seq, counts, 0), 0)
        last = tl.sum(tl.where(owner <= seq, counts, 0), 0)
        # The sink, a key without a value, is the first thing seen.
        top = tl.load(sinks + head + tl.arange(0, 1)) * LOG2E
        total = tl.full([1], 1.0, tl.float32)
        values = tl.zeros([WIDTH], tl.float32)
        # JOINED units are one tile, [JOINED, WIDTH]. The order of the sums depends on the sequence's own units only.
        for start in range(first, last, JOINED):
            unit = start + tl.arange(0, JOINED)
            live = unit < last
            at = unit * QUERY_HEADS + head
            unit_top = tl.load(tops + at, mask=live, other=float("-inf"))
            new_top = tl.maximum(top, tl.max(unit_top, 0))
            # Nothing was seen yet: exp2(-inf - -inf) would be no number, exp2(-inf - 0) is 0.
            finite = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(unit_top - finite)
            keep = tl.exp2(top - finite)
            total = total * keep + tl.sum(weight * tl.load(totals + at, mask=live, other=0.0), 0)
            unit_values = tl.load(values_of + at[:, None] * WIDTH + lane[None, :], mask=live[:, None], other=0.0)
            values = values * keep + tl.sum(weight[:, None] * unit_values, 0)
            top = new_top
        values = values / tl.where(total > 0, total, 1.0)  # a query that sees nothing gives 0
        row = token * QUERY_HEADS + head
        tl.store(out + row * HEAD_DIM + lane, values.to(dtype), mask=lane < HEAD_DIM)
