"""Holds the loops of `pallas_kernels.paged_attention.cpu`, compiled by Numba for the machine they run on.

Queries of neighbouring tokens of a sequence read their keys together, block by block, straight from the pool: scores
of a block, the online softmax of FlashAttention-2 (arXiv 2307.08691, algorithm 1), and the weighted sum of the block's
values. Every sum is over a row's own keys and cut at the same positions: bits do not depend on the batch.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numba import carray, njit

from pallas_kernels import ffi
from pallas_kernels.cpu_tiles import FLOAT
from pallas_kernels.ffi import data as at
from pallas_kernels.ffi import dimension as size
from pallas_kernels.layout import LANES
from pallas_kernels.paged_attention.cpu_block import ROW_BYTES, add_values, scores
from pallas_kernels.paged_attention.cpu_math import FAST, cap_scores, exponentials, f32, hide

SPAN = 64
"""Keys whose softmax is taken at once, a whole number of blocks: enough to fill vectors."""


@cache
def target() -> str:
    """Return the name of the custom call, compiled and registered when first asked for.

    Arguments of the call: q ``[rows, kv_heads, q_per_kv, key_width]``; view; layer ``[1]``; tables
    ``[seqs, pages]``; seq, first and stop ``[rows]``: row r sees keys ``first[r]:stop[r]`` of sequence ``seq[r]``;
    sinks ``[kv_heads, q_per_kv]``, `NO_SINK` where there is none; scale and soft_cap ``[2]``, a cap of 0 for none;
    parts ``[parts]``, ascending first rows: a KV head of the rows from one to the next is an item of work.
    Result: ``[rows, kv_heads, q_per_kv, value_width]``. Where keys fill all tiles of the view, values are their first
    lanes.
    """
    name = "jpaged_paged_attention"
    ffi.register(name, _attend, items_of=((9, 0), (0, 1)), grains=32)
    return name


@njit
def _ints(frame, index):
    """Return an argument of one axis of int32."""
    buffer = ffi.argument(frame, index)
    return carray(at(buffer), (size(buffer, 0),), np.int32)


@njit
def _arrays(frame):
    """Return (q, view, tables, sinks, out) of a call."""
    q, view, tables = ffi.argument(frame, 0), ffi.argument(frame, 1), ffi.argument(frame, 3)
    q_shape = (size(q, 0), size(q, 1), size(q, 2), size(q, 3))
    view_shape = (size(view, 0), size(view, 1), size(view, 2), size(view, 3), size(view, 4), size(view, 5))
    out = ffi.result(frame, 0)
    return (
        carray(at(q), q_shape, np.float32),
        carray(at(view), view_shape, np.float32),
        carray(at(tables), (size(tables, 0), size(tables, 1)), np.int32),
        carray(at(ffi.argument(frame, 7)), q_shape[1:3], np.float32),
        carray(at(out), (*q_shape[:3], size(out, 3)), np.float32),
    )


@njit
def _rows_at(view, layer, block, head):
    """Return the address of a block's rows; what lies there is not to be read where the block or the head does not
    exist."""
    _, layers, heads, tiles, block_size, _ = view.shape
    return view.ctypes.data + ((block * layers + layer) * heads + head) * tiles * block_size * ROW_BYTES


class _Scratch(NamedTuple):
    """Holds what rows that are computed together keep for each of their queries."""

    queries: np.ndarray
    weights: np.ndarray
    values: np.ndarray
    top: np.ndarray
    total: np.ndarray
    shrink: np.ndarray


@njit
def _scratch(number, key_width, value_width, span):
    return _Scratch(
        np.empty((number, key_width), np.float32),
        np.empty((number, span), np.float32),
        np.empty((number, value_width), np.float32),
        np.empty(number, np.float32),
        np.empty(number, np.float32),
        np.empty(number, np.float32),
    )


@njit
def _part(parts, index, num_rows):
    """Return the first row of a part, and of the one after."""
    return parts[index], parts[index + 1] if index + 1 < parts.size else num_rows


@njit
def _load(q, scale, sinks, scratch):
    """Begin with queries [rows, q_per_kv, key_width] that have seen their sinks, keys without a value."""
    number = 0
    for row in range(q.shape[0]):
        for g in range(q.shape[1]):
            scratch.top[number], scratch.total[number] = sinks[g], f32(1.0)
            for lane in range(q.shape[2]):
                scratch.queries[number, lane] = q[row, g, lane] * scale
            for lane in range(scratch.values.shape[1]):
                scratch.values[number, lane] = f32(0.0)
            number += 1


@njit(fastmath=FAST)
def _store(scratch, out):
    """End with the values' means."""
    number = 0
    for row in range(out.shape[0]):
        for g in range(out.shape[1]):
            share = f32(1.0) / scratch.total[number]
            for lane in range(out.shape[2]):
                out[row, g, lane] = scratch.values[number, lane] * share
            number += 1


@njit(error_model="numpy")
def _attend_together(view, layer, head, table, seen, group, cap, scratch):
    """Bring maxima, sums and values up to date with the keys of some rows of one sequence: row r sees those from
    ``seen[0][r]`` to ``seen[1][r]``, and has `group` queries."""
    first, stop = seen
    number, key_width, value_width = first.size * group, scratch.queries.shape[1], scratch.values.shape[1]
    queries, weights, values = scratch.queries[:number], scratch.weights[:number], scratch.values[:number]
    num_blocks, tiles, block_size = view.shape[0], view.shape[3], view.shape[4]
    lanes = min(LANES, key_width)
    k_tiles, v_tiles = key_width // lanes, value_width // lanes
    v_offset = 0  # where keys fill all tiles; else values lie after them, or in the other half of the only one
    if key_width < tiles * LANES:
        v_offset = tiles // 2 * block_size * ROW_BYTES + (LANES - lanes) * FLOAT
    span = weights.shape[1]
    stride, pages_of_span = span * FLOAT, span // block_size
    begin, end = first[0], stop[0]
    for row in range(1, first.size):
        begin, end = min(begin, first[row]), max(end, stop[row])
    pages = range(begin // block_size, (end + block_size - 1) // block_size)
    for page_0 in range(pages.start // pages_of_span * pages_of_span, pages.stop, pages_of_span):
        here, key_0 = range(max(pages.start, page_0), min(pages.stop, page_0 + pages_of_span)), page_0 * block_size
        for page in here:
            block, key = table[page], (page - page_0) * block_size
            if 0 <= block < num_blocks:
                is_last = page + 1 == pages.stop  # then the next head is to come
                next_block = table[pages.start if is_last else page + 1]
                coming = _rows_at(view, layer, next_block, head + is_last)
                rows, to = _rows_at(view, layer, block, head), weights.ctypes.data + key * FLOAT
                scores(queries.ctypes.data, rows, coming, to, stride, number, block_size, k_tiles, lanes, tiles)
                if cap > 0:
                    cap_scores(weights, key, key + block_size, cap)
            else:
                hide(weights, key, key + block_size)
        for row in range(first.size):
            mine = weights[row * group : (row + 1) * group]
            hide(mine, 0, first[row] - key_0)
            hide(mine, stop[row] - key_0, span)
        exponentials(weights, scratch.top, scratch.total, values, scratch.shrink)
        for page in here:
            block, key = table[page], page * block_size
            from_key, to_key = max(begin, key), min(end, key + block_size)
            if 0 <= block < num_blocks:
                rows = _rows_at(view, layer, block, head) + v_offset + (from_key - key) * ROW_BYTES
                mine = weights.ctypes.data + (from_key - key_0) * FLOAT
                for tile in range(v_tiles):
                    v, to = rows + tile * block_size * ROW_BYTES, values.ctypes.data + tile * lanes * FLOAT
                    add_values(mine, stride, v, to, value_width * FLOAT, number, to_key - from_key, lanes)


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _attend(frame, begin_item, end_item):
    q, view, tables, sinks, out = _arrays(frame)
    layer, seq, first, stop = _ints(frame, 2)[0], _ints(frame, 4), _ints(frame, 5), _ints(frame, 6)
    scale, cap = carray(at(ffi.argument(frame, 8)), (2,), np.float32)
    parts = _ints(frame, 9)
    num_rows, num_heads, group, _ = q.shape
    most = 0
    for index in range(parts.size):
        begin, end = _part(parts, index, num_rows)
        most = max(most, end - begin)
    scratch = _scratch(most * group, q.shape[3], out.shape[3], max(1, SPAN // view.shape[4]) * view.shape[4])
    for item in range(begin_item, end_item):
        head = item % num_heads
        row, end = _part(parts, item // num_heads, num_rows)
        while row < end:
            after = row + 1
            while after < end and seq[after] == seq[row]:
                after += 1
            table, seen = tables[seq[row]], (first[row:after], stop[row:after])
            _load(q[row:after, head], scale, sinks[head], scratch)
            _attend_together(view, layer, head, table, seen, group, cap, scratch)
            _store(scratch, out[row:after, head])
            row = after
