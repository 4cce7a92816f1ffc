"""Holds the loops of `pallas_kernels.paged_attention.cpu`, compiled by Numba for the machine they run on.

Queries of neighbouring tokens of a sequence read their keys together, span by span (`cpu_rows`): scores of a span, the
online softmax of FlashAttention-2 (arXiv 2307.08691, algorithm 1), and the weighted sum of the span's values. Long
contexts are cut into splits (`cpu_splits`), whose results are merged in order. Every sum is over a row's own keys, and
cut where the row's own position says: bits do not depend on the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from pallas_kernels.cpu_tiles import FLOAT
from pallas_kernels.ffi_primitives import byte, pointer
from pallas_kernels.layout import LANES
from pallas_kernels.paged_attention.cpu_block import add_values, scores
from pallas_kernels.paged_attention.cpu_few import MOST, add_few_values, takes_few
from pallas_kernels.paged_attention.cpu_math import HALF, HIDDEN, NO_SINK, SPAN, WORD, cap_scores, f32, hide
from pallas_kernels.paged_attention.cpu_rows import bring_keys, bring_values, fetch, float16
from pallas_kernels.paged_attention.cpu_softmax import exponentials

TOGETHER = 24
"""Queries whose scores of a span are kept at once: they stay in the first cache."""


class Memory(NamedTuple):
    """Says where a layer's keys and values lie for one head; all but counts are bytes.

    Attributes:
        base: address of the first block's rows; blocks lie `block_stride` apart, heads of one `head_stride`, tiles
            `tile_stride`, the rows of a tile `row_bytes`.
        number: blocks; each has `block_size` tokens.
        key_halves, value_halves: how many times `HALF` lanes a key and a value have.
        value_lane: of a row's lanes, tile by tile, the first that is the value's.
        scale_token_stride, scale_byte_stride: between the scales of two tokens and of two bytes of one; 0 where rows
            have no scales, which lie after a block's rows of tokens, tile by tile.
    """

    base: int
    block_stride: int
    head_stride: int
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
    """Says where lies what queries that are computed together keep, and a span of keys and values; all are addresses,
    as Numba counts the owners of arrays at every call.

    Attributes:
        queries, values: float32, a row a query; values are weighted sums.
        first, stop: int64, the range of keys that each query sees.
        weights: float32 ``[TOGETHER, SPAN]``.
        top, total, shrink, all_tops, all_totals: float32, one a query.
        keys, wide: float32 ``[key_width, SPAN]`` and ``[value_halves, SPAN, HALF]``; `wide_rows`: addresses of its
            first rows.
        rows, coming: addresses of this span's rows and of the next one's, then those of their blocks.
        moved: such addresses of a lane, for each half of a value.
        scales: float32, one a key.
        nothing: a row of zeros, in the place of one that is not seen.
    """

    queries: int
    values: int
    first: int
    stop: int
    weights: int
    top: int
    total: int
    shrink: int
    all_tops: int
    all_totals: int
    keys: int
    wide: int
    wide_rows: int
    rows: int
    coming: int
    moved: int
    scales: int
    nothing: int


@njit
def floats(address, number):
    """Return so many float32 that lie at an address."""
    return carray(pointer(address), (number,), np.float32)


@njit
def words(address, number):
    """Return so many int64 that lie at an address."""
    return carray(pointer(address), (number,), np.int64)


@njit
def scratch_bytes(number, key_width, value_width):
    """Return how much memory `scratch_at` takes."""
    in_floats = number * (key_width + value_width + 5) + SPAN * (TOGETHER + key_width + value_width + 1) + HALF
    return in_floats * FLOAT + (2 * number + (5 + value_width // HALF) * SPAN) * WORD


@njit
def scratch_at(address, number, key_width, value_width):
    """Return room for so many queries, in memory that begins at an address."""
    first = address
    stop = first + number * WORD
    rows = stop + number * WORD
    coming = rows + 2 * SPAN * WORD
    wide_rows = coming + 2 * SPAN * WORD
    moved = wide_rows + SPAN * WORD
    weights = moved + value_width // HALF * SPAN * WORD
    keys = weights + TOGETHER * SPAN * FLOAT
    wide = keys + key_width * SPAN * FLOAT
    scales = wide + value_width * SPAN * FLOAT
    nothing = scales + SPAN * FLOAT
    queries = nothing + HALF * FLOAT
    values = queries + number * key_width * FLOAT
    top = values + number * value_width * FLOAT
    one = number * FLOAT
    floats(nothing, HALF)[:] = f32(0.0)
    addresses = words(wide_rows, SPAN)
    for n in range(SPAN):
        addresses[n] = wide + n * HALF * FLOAT
    sums = (top, top + one, top + 2 * one, top + 3 * one, top + 4 * one)
    return Scratch(
        queries, values, first, stop, weights, *sums, keys, wide, wide_rows, rows, coming, moved, scales, nothing
    )


@njit
def _find_rows(memory, table, key_0, begin, end, nothing, found):
    """Set the addresses of a span's rows in their first tile, and of their blocks: `nothing` for keys outside of
    [begin, end) and of blocks that do not exist. Returns whether there are such keys, and such blocks."""
    rows, blocks = words(found, SPAN), words(found + SPAN * WORD, SPAN)
    key, stop, holes = max(key_0, begin), min(key_0 + SPAN, end), False
    whole = key == key_0 and stop == key_0 + SPAN
    if not whole:
        rows[:] = nothing
    while key < stop:
        page = key // memory.block_size
        block, offset = table[page], key - page * memory.block_size
        after = min(stop, key + memory.block_size - offset)
        start = memory.base + block * memory.block_stride
        row, step = start + offset * memory.row_bytes, memory.row_bytes
        if not 0 <= block < memory.number:
            row, step, holes = nothing, 0, True
        for n in range(after - key):
            rows[key - key_0 + n] = row + n * step
            blocks[key - key_0 + n] = start
        key = after
    return holes or not whole, holes


@njit
def _move(rows, offset, nothing, moved):
    """Set the addresses of the same tokens' rows `offset` bytes further."""
    ours, theirs = words(rows, SPAN), words(moved, SPAN)
    for n in range(SPAN):
        theirs[n] = nothing if ours[n] == nothing else ours[n] + offset


@njit
def _find_scales(memory, found, tile, half, nothing, out):
    """Set the scales of a span's rows in one half of a tile."""
    rows, blocks, scales = words(found, SPAN), words(found + SPAN * WORD, SPAN), floats(out, SPAN)
    codes = memory.block_size * memory.row_bytes
    first = tile * memory.tile_stride + codes + 2 * half * memory.scale_byte_stride
    for n in range(SPAN):
        scales[n] = f32(0.0)
        if rows[n] != nothing:
            token = (rows[n] - blocks[n]) // LANES
            low = blocks[n] + first + token * memory.scale_token_stride
            scales[n] = float16(byte(low), byte(low + memory.scale_byte_stride))


@njit
def _offset(memory, lane):
    """Return the bytes from a token's row in its first tile to one of its lanes."""
    return lane // LANES * memory.tile_stride + lane % LANES * (memory.row_bytes // LANES)


@njit
def _fetch_values(memory, numbers, rows, further, begin):
    """Fetch the values of a span's rows behind the first, `begin`, whose head lies so many bytes further."""
    if memory.value_lane:  # else they are the keys
        for half in range(memory.value_halves):
            fetch(numbers, rows, further + _offset(memory, memory.value_lane + half * HALF), begin)


@njit
def _rows_at(memory, rows, partly, lane, moved, scratch):
    """Return the addresses of a span's rows and the bytes from there to a lane, and find their scales; where not all
    rows are there, the addresses are those of the lane, at `moved`."""
    offset = _offset(memory, lane)
    if memory.scale_token_stride:
        _find_scales(memory, rows, lane // LANES, lane % LANES // HALF, scratch.nothing, scratch.scales)
    if not partly:
        return rows, offset
    _move(rows, offset, scratch.nothing, moved)
    return moved, 0


@njit
def _bring_keys(memory, numbers, rows, keys, partly, coming, further, scratch):
    """Bring the keys of a span, as float32, to ``scratch.keys``, and fetch those that are coming."""
    for half in range(memory.key_halves):
        ours, offset = _rows_at(memory, rows, partly, half * HALF, scratch.moved, scratch)
        theirs, to = further + _offset(memory, half * HALF), scratch.keys + half * HALF * SPAN * FLOAT
        bring_keys(numbers, ours, keys, offset, scratch.scales, to, coming, theirs)


@njit
def _bring_values(memory, numbers, rows, keys, partly, in_place, scratch):
    """Bring the values of a span, as float32, to ``scratch.wide``, unless they are read where they are."""
    for half in range(memory.value_halves):
        moved = scratch.moved + half * SPAN * WORD
        ours, offset = _rows_at(memory, rows, partly, memory.value_lane + half * HALF, moved, scratch)
        if not in_place:
            to = scratch.wide + half * SPAN * HALF * FLOAT
            bring_values(numbers, ours, keys, offset, scratch.scales, to, HALF * FLOAT)


@njit
def _values_at(memory, rows, partly, half, in_place, scratch):
    """Return the addresses of a span's values, brought by `_bring_values`, and the bytes from there to `HALF` of their
    lanes."""
    if not in_place:
        return scratch.wide_rows, half * SPAN * HALF * FLOAT
    if partly:
        return scratch.moved + half * SPAN * WORD, 0
    return rows, _offset(memory, memory.value_lane + half * HALF)


@njit
def _hide(weights, number, first, stop, begin, end, key_0):
    """Hide the keys that rows do not see."""
    first, stop = words(first, number), words(stop, number)
    for n in range(number):
        mine = floats(weights + n * SPAN * FLOAT, SPAN)
        hide(mine, 0, max(begin, first[n]) - key_0)
        hide(mine, min(end, stop[n]) - key_0, SPAN)


@njit
def _hide_holes(weights, number, found, nothing):
    """Hide the keys of blocks that do not exist from all rows."""
    rows = words(found, SPAN)
    for n in range(number):
        mine = floats(weights + n * SPAN * FLOAT, SPAN)
        for key in range(SPAN):
            if rows[key] == nothing:
                mine[key] = HIDDEN


@njit
def _range(address, number, low, high):
    """Return the least and the greatest of some numbers, both from `low` to `high`."""
    values = words(address, number)
    least, greatest = high, low
    for n in range(number):
        least, greatest = min(least, values[n]), max(greatest, values[n])
    return least, greatest


@njit
def _begin(scratch, number, value_width):
    top, total, values = (
        floats(scratch.top, number),
        floats(scratch.total, number),
        floats(scratch.values, number * value_width),
    )
    top[:] = NO_SINK
    total[:] = f32(0.0)
    values[:] = f32(0.0)


@njit
def _take_softmax(memory, scratch, rows, key_0, seen, at, number, cap, holes):
    """Put weights in the place of the scores of some queries, whose maxima and sums are brought up to date; returns
    False if none of them sees a key of the span.

    Args:
        seen: the keys that any query sees, from the first to the end.
        at: the first of the queries.
        holes: whether blocks of the span do not exist.
    """
    begin, end = seen
    first, stop, weights, each = scratch.first + at * WORD, scratch.stop + at * WORD, scratch.weights, at * FLOAT
    least_first, last_first = _range(first, number, begin, end)
    least_stop, last_stop = _range(stop, number, begin, end)
    if last_stop <= key_0 or least_first >= key_0 + SPAN:
        return False
    key_width = memory.key_halves * HALF
    scores(scratch.queries + each * key_width, key_width, scratch.keys, weights, number)
    if cap > 0:
        cap_scores(floats(weights, number * SPAN), cap)
    if last_first > key_0 or least_stop < key_0 + SPAN:
        _hide(weights, number, first, stop, begin, end, key_0)
    if holes:
        _hide_holes(weights, number, rows, scratch.nothing)
    exponentials(weights, scratch.top + each, scratch.total + each, scratch.shrink, number)
    return True


@njit(error_model="numpy")
def attend(memory, numbers, table, number, begin, end, cap, then, scratch):
    """Compute maxima, sums and weighted values of the first `number` queries in `scratch`, from nothing, over the keys
    from `begin` to `end` that each of them sees.

    `then` says what will be read afterwards: a table, its first key and the last one's end, and how much further its
    head lies; the first of it is fetched meanwhile.
    """
    value_width = memory.value_halves * HALF
    few = takes_few(numbers) and number <= MOST
    in_place = few or numbers.bytes == FLOAT
    _begin(scratch, number, value_width)
    rows, coming, key_0 = scratch.rows, scratch.coming, begin // SPAN * SPAN
    partly, holes = _find_rows(memory, table, key_0, begin, end, scratch.nothing, rows)
    while key_0 < end:
        following, then_partly, then_holes, further = key_0 + SPAN, False, False, 0
        if following < end:
            then_partly, then_holes = _find_rows(memory, table, following, begin, end, scratch.nothing, coming)
        else:
            its_table, its_begin, its_end, further = then
            first = its_begin // SPAN * SPAN
            _find_rows(memory, its_table, first, its_begin, its_end, scratch.nothing, coming)
        keys = min(SPAN, end - key_0)
        _bring_keys(memory, numbers, rows, keys, partly, coming, further, scratch)
        _bring_values(memory, numbers, rows, keys, partly, in_place, scratch)
        for at in range(0, number, TOGETHER):
            some = min(TOGETHER, number - at)
            if not _take_softmax(memory, scratch, rows, key_0, (begin, end), at, some, cap, holes):
                continue
            if at == 0:
                _fetch_values(memory, numbers, coming, further, keys if few else 0)
            for half in range(memory.value_halves):
                values, offset = _values_at(memory, rows, partly, half, in_place, scratch)
                to = scratch.values + (at * value_width + half * HALF) * FLOAT
                if few:
                    theirs = further + _offset(memory, memory.value_lane + half * HALF)
                    add_few_values(
                        numbers,
                        scratch.weights,
                        values,
                        offset,
                        keys,
                        to,
                        value_width,
                        scratch.shrink,
                        some,
                        coming,
                        theirs,
                    )
                else:
                    add_values(scratch.weights, values, offset, keys, to, value_width, scratch.shrink, some)
        rows, coming, partly, holes = coming, rows, then_partly, then_holes
        key_0 = following
