"""The loops of `pallas_kernels.paged_attention.cpu`, compiled by Numba for the machine they run on.

Of each query row and KV head, the keys are read once, block by block, straight from the pool: scores of a block, the
online softmax of FlashAttention-2 (arXiv 2307.08691, algorithm 1), and the weighted sum of the block's values. What a
row gets depends on its own keys only, and every block is cut at the same positions: bits do not depend on the batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, cfunc, njit

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
def target(q_per_kv: int, tiles: int, soft_cap: float | None) -> str:
    """Name of the custom call for heads of this shape, compiled and registered when first asked for.

    Arguments of the call: q ``[rows, kv_heads, q_per_kv, padded_dim]``, scaled; view; layer ``[1]``; tables
    ``[seqs, pages]``; seq, first and stop ``[rows]``: row r sees keys ``first[r]:stop[r]`` of sequence ``seq[r]``;
    sinks ``[kv_heads, q_per_kv]``, `NEVER` where there is none.
    Result: like q. An item of work is one KV head of a row.
    """
    name = f"jpaged_paged_attention_{q_per_kv}_{tiles}_{soft_cap or 0.0}"
    ffi.register(name, _attend(q_per_kv, tiles, soft_cap or 0.0), item_axes=(0, 1))
    return name


@njit
def _arrays(frame):
    """(q, view, layer, tables, seq, first, stop, sinks, out) of a call."""
    q, view, tables = ffi.argument(frame, 0), ffi.argument(frame, 1), ffi.argument(frame, 3)
    rows = size(q, 0)
    q_shape = (rows, size(q, 1), size(q, 2), size(q, 3))
    view_shape = (size(view, 0), size(view, 1), size(view, 2), size(view, 3), size(view, 4), size(view, 5))
    return (
        carray(at(q), q_shape, np.float32),
        carray(at(view), view_shape, np.float32),
        carray(at(ffi.argument(frame, 2)), (1,), np.int32)[0],
        carray(at(tables), (size(tables, 0), size(tables, 1)), np.int32),
        carray(at(ffi.argument(frame, 4)), (rows,), np.int32),
        carray(at(ffi.argument(frame, 5)), (rows,), np.int32),
        carray(at(ffi.argument(frame, 6)), (rows,), np.int32),
        carray(at(ffi.argument(frame, 7)), q_shape[1:3], np.float32),
        carray(at(ffi.result(frame, 0)), q_shape, np.float32),
    )


@njit
def _rows_at(view, layer, block, head):
    """Address of a block's rows; what lies there is not to be read where the block or the head does not exist."""
    _, layers, heads, tiles, block_size, _ = view.shape
    return view.ctypes.data + ((block * layers + layer) * heads + head) * tiles * block_size * ROW_BYTES


def _attend(group: int, tiles: int, cap: float) -> Any:
    """The loops for a static shape; `cap` 0 = none. Closes over plain values only, so that Numba can cache it."""
    lanes = LANES // 2 if tiles == 1 else LANES
    parts = max(1, tiles // 2)  # tiles of K; V has as many after them, or the other half of the only one
    value_tile, value_lane = tiles // 2, LANES - lanes
    width = parts * lanes

    @cfunc(ffi.RUN, fastmath=FAST, error_model="numpy", cache=True)
    def attend(frame, begin_item, end_item):
        q, view, layer, tables, seq, first, stop, sinks, out = _arrays(frame)
        num_blocks, block_size = view.shape[0], view.shape[4]
        span = max(1, SPAN // block_size)
        weights = np.empty((group, span * block_size), np.float32)
        values = np.empty((group, width), np.float32)
        top = np.empty(group, np.float32)
        total = np.empty(group, np.float32)
        at_weights, stride = weights.ctypes.data, span * block_size * FLOAT
        for item in range(begin_item, end_item):
            row, head = item // q.shape[1], item % q.shape[1]
            queries = q.ctypes.data + item * group * width * FLOAT
            pages = range(first[row] // block_size, (stop[row] + block_size - 1) // block_size)
            for g in range(group):
                top[g], total[g] = sinks[head, g], f32(1.0)  # a key without a value, the first thing seen
                for lane in range(width):
                    values[g, lane] = f32(0.0)
            for page_0 in range(pages.start // span * span, pages.stop, span):
                here = range(max(pages.start, page_0), min(pages.stop, page_0 + span))
                for page in here:
                    block, key = tables[seq[row], page], (page - page_0) * block_size
                    if 0 <= block < num_blocks:
                        is_last = page + 1 == pages.stop  # then the next head is to come
                        next_block = tables[seq[row], pages.start if is_last else page + 1]
                        coming = _rows_at(view, layer, next_block, head + is_last)
                        rows, to = _rows_at(view, layer, block, head), at_weights + key * FLOAT
                        scores(queries, rows, coming, to, stride, group, block_size, parts, lanes)
                        if cap > 0:
                            cap_scores(weights, key, key + block_size, f32(cap))
                    else:
                        hide(weights, key, key + block_size)
                key_0 = page_0 * block_size
                hide(weights, 0, first[row] - key_0)
                hide(weights, stop[row] - key_0, span * block_size)
                exponentials(weights, top, total, values)
                for page in here:
                    block, key = tables[seq[row], page], page * block_size
                    begin, end = max(first[row], key), min(stop[row], key + block_size)
                    if 0 <= block < num_blocks:
                        rows = _rows_at(view, layer, block, head) + (begin - key) * ROW_BYTES
                        mine = at_weights + (begin - key_0) * FLOAT
                        for part in range(parts):
                            v = rows + (value_tile + part) * block_size * ROW_BYTES + value_lane * FLOAT
                            to = values.ctypes.data + part * lanes * FLOAT
                            add_values(mine, stride, v, to, width * FLOAT, group, end - begin, lanes)
            for g in range(group):
                share = f32(1.0) / total[g]
                for lane in range(width):
                    out[row, head, g, lane] = values[g, lane] * share

    return attend
