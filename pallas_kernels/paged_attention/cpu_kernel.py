"""Holds the loops of `pallas_kernels.paged_attention.cpu`, compiled by Numba for the machine they run on.

Queries of neighbouring tokens of a sequence read their keys together, span by span (`cpu_rows`): scores of a span, the
online softmax of FlashAttention-2 (arXiv 2307.08691, algorithm 1), and the weighted sum of the span's values. Long
contexts are cut into splits (`cpu_splits`), whose results are merged in order. Every sum is over a row's own keys, and
cut where the row's own position says: bits do not depend on the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from pallas_kernels.cpu_tiles import FLOAT
from pallas_kernels.ffi_primitives import byte
from pallas_kernels.layout import LANES
from pallas_kernels.paged_attention.cpu_block import add_values, scores
from pallas_kernels.paged_attention.cpu_math import HIDDEN, NO_SINK, SPAN, cap_scores, f32, hide
from pallas_kernels.paged_attention.cpu_rows import HALF, bring, float16
from pallas_kernels.paged_attention.cpu_softmax import exponentials

TOGETHER = 24
"""Queries whose scores of a span are kept at once: they stay in the first cache."""


class Memory(NamedTuple):
    """Says where a layer's keys and values lie for one head; all but counts are bytes.

    Attributes:
        base: address of the first block's rows; blocks lie `block_stride` apart, the tiles of one `tile_stride`, the
            rows of a tile `row_bytes`.
        number: blocks; each has `block_size` tokens.
        key_halves, value_halves: how many times `HALF` lanes a key and a value have.
        value_lane: of a row's lanes, tile by tile, the first that is the value's.
        scale_token_stride, scale_byte_stride: between the scales of two tokens and of two bytes of one; 0 where rows
            have no scales, which lie after a block's rows of tokens, tile by tile.
    """

    base: int
    block_stride: int
    tile_stride: int
    row_bytes: int
    number: int
    block_size: int
    key_halves: int
    value_halves: int
    value_lane: int
    scale_token_stride: int
    scale_byte_stride: int


class Scratch(NamedTuple):
    """Holds what queries that are computed together keep; `nothing` is a row of zeros in the place of one not seen."""

    queries: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    weights: np.ndarray
    values: np.ndarray
    top: np.ndarray
    total: np.ndarray
    shrink: np.ndarray
    keys: np.ndarray
    wide: np.ndarray
    rows: np.ndarray
    blocks: np.ndarray
    coming: np.ndarray
    their_blocks: np.ndarray
    here: np.ndarray
    there: np.ndarray
    scales: np.ndarray
    nothing: np.ndarray


@njit
def scratch_for(number, key_width, value_width):
    """Return room for so many queries."""
    return Scratch(
        np.empty((number, key_width), np.float32),
        np.empty(number, np.int64),
        np.empty(number, np.int64),
        np.empty((TOGETHER, SPAN), np.float32),
        np.empty((number, value_width), np.float32),
        np.empty(number, np.float32),
        np.empty(number, np.float32),
        np.empty(number, np.float32),
        np.empty((key_width, SPAN), np.float32),
        np.empty((SPAN, value_width), np.float32),
        np.empty(SPAN, np.int64),
        np.empty(SPAN, np.int64),
        np.empty(SPAN, np.int64),
        np.empty(SPAN, np.int64),
        np.empty(SPAN, np.int64),
        np.empty(SPAN, np.int64),
        np.zeros(SPAN, np.float32),
        np.zeros(HALF, np.float32),
    )


@njit
def _find_rows(memory, table, key_0, begin, end, nothing, rows, blocks):
    """Set the addresses of a span's rows in their first tile, and of their blocks: `nothing` for keys outside of [begin,
    end) and of blocks that do not exist. Returns whether there are such blocks."""
    holes, key, stop = False, max(key_0, begin), min(key_0 + SPAN, end)
    if key > key_0 or stop < key_0 + SPAN:
        rows[:] = nothing
    while key < stop:
        page = key // memory.block_size
        block, offset = table[page], key - page * memory.block_size
        after = min(stop, key + memory.block_size - offset)
        exists = 0 <= block < memory.number
        holes |= not exists
        start = memory.base + block * memory.block_stride
        for n in range(key - key_0, after - key_0):
            rows[n] = start + (offset + n + key_0 - key) * memory.row_bytes if exists else nothing
            blocks[n] = start
        key = after
    return holes


@njit
def _move(rows, offset, nothing, out):
    """Set the addresses of the same tokens' rows `offset` bytes further."""
    for n in range(SPAN):
        out[n] = nothing if rows[n] == nothing else rows[n] + offset


@njit
def _find_scales(memory, scratch, tile, half, nothing):
    """Set the scales of a span's rows in one half of a tile."""
    codes = memory.block_size * memory.row_bytes
    first = tile * memory.tile_stride + codes + 2 * half * memory.scale_byte_stride
    for n in range(SPAN):
        row = scratch.rows[n]
        if row == nothing:
            scratch.scales[n] = f32(0.0)
        else:
            token = (row - scratch.blocks[n]) // LANES
            low = scratch.blocks[n] + first + token * memory.scale_token_stride
            scratch.scales[n] = float16(byte(low), byte(low + memory.scale_byte_stride))


@njit
def _bring(memory, numbers, scratch):
    """Bring the rows of a span, as float32, to ``scratch.keys`` and ``scratch.wide``."""
    width = memory.value_halves * HALF * FLOAT
    nothing, rows, coming = scratch.nothing.ctypes.data, scratch.here.ctypes.data, scratch.there.ctypes.data
    for number in range(memory.key_halves + memory.value_halves):
        is_value = number >= memory.key_halves
        half = number - memory.key_halves if is_value else number
        lane = half * HALF + (memory.value_lane if is_value else 0)
        tile = lane // LANES
        offset = tile * memory.tile_stride + lane % LANES * (memory.row_bytes // LANES)
        _move(scratch.rows, offset, nothing, scratch.here)
        _move(scratch.coming, offset, nothing, scratch.there)
        if memory.scale_token_stride:
            _find_scales(memory, scratch, tile, lane % LANES // HALF, nothing)
        if is_value:
            to, stride = scratch.wide.ctypes.data + half * HALF * FLOAT, width
        else:
            to, stride = scratch.keys.ctypes.data + half * HALF * SPAN * FLOAT, SPAN * FLOAT
        bring(numbers, rows, coming, scratch.scales.ctypes.data, to, stride, not is_value)


@njit(error_model="numpy")
def attend(memory, numbers, table, number, begin, end, cap, scratch):
    """Compute maxima, sums and weighted values of the first `number` queries in ``scratch``, from nothing, over the keys
    from `begin` to `end` that each of them sees."""
    for n in range(number):
        scratch.top[n], scratch.total[n] = NO_SINK, f32(0.0)
    values = scratch.values[:number]
    values[:] = f32(0.0)
    key_width, value_width = memory.key_halves * HALF, memory.value_halves * HALF
    nothing, weights = scratch.nothing.ctypes.data, scratch.weights
    for key_0 in range(begin // SPAN * SPAN, end, SPAN):
        holes = _find_rows(memory, table, key_0, begin, end, nothing, scratch.rows, scratch.blocks)
        _find_rows(memory, table, key_0 + SPAN, begin, end, nothing, scratch.coming, scratch.their_blocks)
        _bring(memory, numbers, scratch)
        for at in range(0, number, TOGETHER):
            some = min(TOGETHER, number - at)
            latest_first, last_stop, earliest_stop, first_first = begin, begin, end, end
            for n in range(at, at + some):
                latest_first, first_first = max(latest_first, scratch.first[n]), min(first_first, scratch.first[n])
                earliest_stop, last_stop = min(earliest_stop, scratch.stop[n]), max(last_stop, scratch.stop[n])
            if last_stop <= key_0 or first_first >= key_0 + SPAN:
                continue
            x = scratch.queries.ctypes.data + at * key_width * FLOAT
            scores(x, key_width, scratch.keys.ctypes.data, weights.ctypes.data, some)
            if cap > 0:
                cap_scores(weights[:some], cap)
            if latest_first > key_0 or earliest_stop < key_0 + SPAN:
                for n in range(some):
                    mine = weights[n : n + 1]
                    hide(mine, 0, max(begin, scratch.first[at + n]) - key_0)
                    hide(mine, min(end, scratch.stop[at + n]) - key_0, SPAN)
            if holes:
                for n in range(SPAN):
                    if scratch.rows[n] == nothing:
                        weights[:some, n] = HIDDEN
            each = at * FLOAT
            top, total, shrink = scratch.top.ctypes.data, scratch.total.ctypes.data, scratch.shrink.ctypes.data
            exponentials(weights.ctypes.data, top + each, total + each, shrink, some)
            to = scratch.values.ctypes.data + at * value_width * FLOAT
            add_values(weights.ctypes.data, scratch.wide.ctypes.data, value_width, to, shrink, some)
