"""Says where a layer's keys and values lie for one head, and brings a span of them as float32."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, njit

from pallas_kernels.cpu_tiles import FLOAT, LINE_BYTES
from pallas_kernels.ffi.primitives import byte, pointer, prefetch
from pallas_kernels.kv_codes import SCALE_BYTES
from pallas_kernels.layout import LANES
from pallas_kernels.paged_attention.cpu_math import HALF, SPAN, WORD, f32
from pallas_kernels.paged_attention.cpu_rows import bring_keys, bring_values, fetch, float16
from pallas_kernels.paged_attention.cpu_scratch import floats, words


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


@njit
def find_rows(memory, table, key_0, begin, end, nothing, found):
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
    """Do as `_find_scales` where a token's two scales are a word, and a block's words lie side by side; `scales` is an
    address."""
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
        # Arrays of their own, as Numba turns an index that is added up into one that may count from the end.
        found = floats(scales + key * FLOAT, after - key)
        for n in range(after - key):
            found[n] = float16((pairs[n] >> np.int32(shift)) & np.int32(0xFFFF))
        key = after


@njit
def fetch_scales(memory, found, further, nothing):
    """Fetch the scales of a span's rows, whose head lies so many bytes further, if they lie as words side by side."""
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
    """Fetch the values of a span's rows behind the first, `begin`, whose head lies so many bytes further."""
    if memory.value_lane:  # else they are the keys
        for half in range(memory.value_halves):
            fetch(numbers, rows, further + value_offset(memory, half), begin)


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
def load_keys(memory, numbers, rows, keys, partly, coming, further, scratch):
    """Bring the keys of a span, as float32, to ``scratch.keys``, and fetch those that are coming."""
    fetch_scales(memory, coming, further, scratch.nothing)
    for half in range(memory.key_halves):
        ours, offset = _rows_at(memory, rows, partly, half * HALF, scratch.moved, scratch)
        theirs, to = further + _offset(memory, half * HALF), scratch.keys + half * HALF * SPAN * FLOAT
        bring_keys(numbers, ours, keys, offset, scratch.scales, to, coming, theirs)


@njit
def load_values(memory, numbers, rows, keys, partly, in_place, scratch):
    """Bring the values of a span, as float32, to ``scratch.wide``, unless they are read where they are."""
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
    """Find the scales of `HALF` lanes of a span's values, if they have some, and return their address."""
    if memory.scale_token_stride:
        lane = memory.value_lane + half * HALF
        _find_scales(memory, rows, lane // LANES, lane % LANES // HALF, scratch.nothing, scratch.scales)
    return scratch.scales


@njit
def values_at(memory, rows, partly, half, in_place, scratch):
    """Return the addresses of a span's values, brought by `load_values`, and the bytes from there to `HALF` of their
    lanes."""
    if not in_place:
        return scratch.wide_rows, half * SPAN * HALF * FLOAT
    if partly:
        return scratch.moved + half * SPAN * WORD, 0
    return rows, value_offset(memory, half)
