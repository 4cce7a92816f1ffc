"""Locates a layer's keys and values of one head in the pool, and loads a span of them as float32.

A token's row lies in its block, tile by tile: 128 lanes in each tile, the rows of a block's tokens one after another,
then the rows of scales where the dtype has them. K comes first and V after it, or V is K's first lanes.

    block b, layer l, head h:  [tile 0: token 0 .. token n-1, scales][tile 1: ...]...
    `rows`: address of each token's row in tile 0; the same offset leads from there to a lane, for all tokens

A list of addresses replaces the block table inside a span, so that loops need no division by the block size. Keys that
a query must not read, since their blocks do not exist, have the address of a row of zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from pallas_kernels.cpu_math import f32, fill
from pallas_kernels.cpu_tiles import FLOAT, LINE_BYTES
from pallas_kernels.ffi.loops import njit
from pallas_kernels.ffi.primitives import byte, load_int, pointer, prefetch
from pallas_kernels.kv_codes import SCALE_BYTES
from pallas_kernels.layout import LANES
from pallas_kernels.paged_attention.cpu_rows import bring_keys, bring_values, fetch, float16
from pallas_kernels.paged_attention.cpu_scratch import HALF, SPAN, WORD, floats, words


class Memory(NamedTuple):
    """Describes where a layer's keys and values of one head lie; all fields but counts are in bytes.

    Attributes:
        base: address of the first block's rows; blocks lie `block_stride` apart, heads of one `head_stride`, tiles
            `tile_stride`, the rows of a tile `row_bytes`.
        number: blocks; each has `block_size` tokens.
        key_halves, value_halves: width of a key and of a value, in units of `HALF` lanes.
        value_lane: the value's first lane in a row, whose lanes are counted tile by tile.
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


@njit
def find_rows(memory, table, key_0, begin, end, nothing, found):
    """Write to `found` the addresses of a span's rows in their first tile, then those of their blocks.

    Keys outside of [begin, end) and keys of blocks that do not exist get the address `nothing`. Returns whether there
    are such keys at all, and whether there are such blocks.
    """
    rows, blocks = words(found, SPAN), words(found + SPAN * WORD, SPAN)
    key, stop, holes = max(key_0, begin), min(key_0 + SPAN, end), False
    whole = key == key_0 and stop == key_0 + SPAN
    if not whole:
        fill(rows, nothing)
    # Page by page, as a block's rows lie side by side: one look-up in the table serves block_size keys.
    while key < stop:
        page = key // memory.block_size
        block, offset = load_int(table + page * FLOAT), key - page * memory.block_size
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
    """Write to `moved` the addresses at `rows` plus `offset` bytes; rows that are not seen stay `nothing`."""
    ours, theirs = words(rows, SPAN), words(moved, SPAN)
    for n in range(SPAN):
        theirs[n] = nothing if ours[n] == nothing else ours[n] + offset


@njit
def _find_scales(memory, found, tile, half, nothing, out):
    """Write to `out` the scales of a span's rows for one half of a tile, as float32."""
    rows, blocks = words(found, SPAN), words(found + SPAN * WORD, SPAN)
    first = tile * memory.tile_stride + memory.block_size * memory.row_bytes
    if memory.scale_byte_stride == 1 and memory.scale_token_stride == SCALE_BYTES:
        _find_words_of_scales(memory, rows, blocks, first, 16 * half, nothing, out)
        return
    scales = floats(out, SPAN)
    first += 2 * half * memory.scale_byte_stride
    for n in range(SPAN):
        scales[n] = f32(0.0)
        if rows[n] != nothing:
            token = (rows[n] - blocks[n]) // LANES
            low = blocks[n] + first + token * memory.scale_token_stride
            high = byte(low + memory.scale_byte_stride)
            scales[n] = float16((np.int32(high) << np.int32(8)) | np.int32(byte(low)))


@njit
def _find_words_of_scales(memory, rows, blocks, first, shift, nothing, scales):
    """Do the same as `_find_scales` where a token's two scales form one word and a block's words lie side by side;
    `scales` is an address."""
    key = 0
    while key < SPAN:
        if rows[key] == nothing:
            floats(scales + key * FLOAT, 1)[0] = f32(0.0)
            key += 1
            continue
        token = (rows[key] - blocks[key]) // LANES
        after = min(SPAN, key + memory.block_size - token)
        while rows[after - 1] == nothing:  # keys are seen up to one within the block
            after -= 1
        pairs = carray(pointer(blocks[key] + first + token * SCALE_BYTES), (after - key,), np.int32)
        # Separate arrays, indexed from 0: for a computed index, such as key + n, Numba handles negative values too.
        found = floats(scales + key * FLOAT, after - key)
        for n in range(after - key):
            found[n] = float16((pairs[n] >> np.int32(shift)) & np.int32(0xFFFF))
        key = after


@njit
def fetch_scales(memory, found, further, nothing):
    """Prefetch the scales of a span's rows, for a head `further` bytes on, if they lie as words side by side."""
    if memory.scale_token_stride != SCALE_BYTES or memory.scale_byte_stride != 1:
        return
    rows, blocks = words(found, SPAN), words(found + SPAN * WORD, SPAN)
    first, tiles = memory.block_size * memory.row_bytes, memory.value_lane + memory.value_halves * HALF
    for key in range(0, SPAN, min(memory.block_size, LINE_BYTES // SCALE_BYTES)):
        if rows[key] != nothing:
            token = (rows[key] - blocks[key]) // LANES
            for tile in range((tiles + LANES - 1) // LANES):
                there = blocks[key] + further + tile * memory.tile_stride
                prefetch(there + first + token * SCALE_BYTES)


@njit
def _offset(memory, lane):
    """Return the bytes from a token's row in its first tile to one of its lanes."""
    return lane // LANES * memory.tile_stride + lane % LANES * (memory.row_bytes // LANES)


@njit
def value_offset(memory, half):
    """Return the bytes from a token's row in its first tile to `HALF` lanes of its value."""
    return _offset(memory, memory.value_lane + half * HALF)


@njit
def fetch_values(memory, numbers, rows, further, begin):
    """Prefetch the values of a span's rows from about row `begin` on, for a head `further` bytes on."""
    if memory.value_lane:  # at 0 the values are the keys' own lanes, which are fetched already
        for half in range(memory.value_halves):
            fetch(numbers, rows, further + value_offset(memory, half), begin)


@njit
def _rows_at(memory, rows, partly, lane, moved, scratch):
    """Return the addresses of a span's rows and the offset in bytes to a lane, and find their scales.

    If some rows are missing, the addresses are written to `moved` with the offset already added and the returned offset
    is 0: the row of zeros that replaces a missing row has no other lanes.
    """
    offset = _offset(memory, lane)
    if memory.scale_token_stride:
        _find_scales(memory, rows, lane // LANES, lane % LANES // HALF, scratch.nothing, scratch.scales)
    if not partly:
        return rows, offset
    _move(rows, offset, scratch.nothing, moved)
    return moved, 0


@njit
def load_keys(memory, numbers, rows, keys, partly, coming, further, scratch):
    """Load a span's keys to ``scratch.keys``, as transposed float32, and prefetch the rows at `coming`."""
    fetch_scales(memory, coming, further, scratch.nothing)
    for half in range(memory.key_halves):
        ours, offset = _rows_at(memory, rows, partly, half * HALF, scratch.moved, scratch)
        theirs, to = further + _offset(memory, half * HALF), scratch.keys + half * HALF * SPAN * FLOAT
        bring_keys(numbers, ours, keys, offset, scratch.scales, to, coming, theirs)


@njit
def load_values(memory, numbers, rows, keys, partly, in_place, scratch):
    """Load a span's first `keys` values to ``scratch.wide`` as float32, unless they are read `in_place`.

    If they are, and some rows are missing (`partly`), only the addresses to read are written, to ``scratch.moved``.
    """
    for half in range(memory.value_halves):
        moved, lane = scratch.moved + half * SPAN * WORD, memory.value_lane + half * HALF
        if not in_place:
            ours, offset = _rows_at(memory, rows, partly, lane, moved, scratch)
            to = scratch.wide + half * SPAN * HALF * FLOAT
            bring_values(numbers, ours, keys, offset, scratch.scales, to, HALF * FLOAT)
        elif partly:
            _move(rows, _offset(memory, lane), scratch.nothing, moved)


@njit
def find_value_scales(memory, rows, half, scratch):
    """Load the scales of `HALF` lanes of a span's values, if the dtype has scales, and return their address."""
    if memory.scale_token_stride:
        lane = memory.value_lane + half * HALF
        _find_scales(memory, rows, lane // LANES, lane % LANES // HALF, scratch.nothing, scratch.scales)
    return scratch.scales


@njit
def values_at(memory, rows, partly, half, in_place, scratch):
    """Return the addresses of a span's values after `load_values`, and the offset in bytes to one half of their
    lanes."""
    if not in_place:
        return scratch.wide_rows, half * SPAN * HALF * FLOAT
    if partly:
        return scratch.moved + half * SPAN * WORD, 0
    return rows, value_offset(memory, half)
