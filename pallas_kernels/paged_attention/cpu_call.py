"""Holds the custom calls of `pallas_kernels.paged_attention.cpu`: their arguments, and how threads share the work.

An item of work is one KV head of the queries of neighbouring tokens, with all their keys. Where sequences have one
token each, an item is one split of a token's keys (flash-decoding): partial results, [rows, heads, splits, ...], go to
a buffer that XLA gives the call, a counter for each row and head says how many splits have ended, and the thread that
finishes a token's last split merges all its splits in a fixed order.

A row's splits depend on its own position only, so that it has the same bits in a chunk of its prompt, where one thread
takes split by split, and in decoding, where several threads do.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from pallas_kernels import ffi
from pallas_kernels.cpu_math import FAST, LN_2, LOG2_E, exp, f32
from pallas_kernels.ffi import address, argument, dimension, result
from pallas_kernels.ffi import data as at
from pallas_kernels.ffi.helpers import njit
from pallas_kernels.ffi.primitives import add, allocate, free, pointer
from pallas_kernels.layout import LANES
from pallas_kernels.paged_attention.cpu_kernel import attend
from pallas_kernels.paged_attention.cpu_memory import Memory
from pallas_kernels.paged_attention.cpu_rows import BFLOAT16, FLOAT8, FLOAT32, INT8
from pallas_kernels.paged_attention.cpu_scratch import HALF, floats, scratch_at, scratch_bytes, words
from pallas_kernels.paged_attention.numba_precompile import note_compiled

SPLIT = 1024
"""Keys of a split, doubled until a context has at most `MOST_SPLITS` splits."""
MOST_SPLITS = 16


def most_splits(keys: int) -> int:
    """Return the most splits that a context of up to `keys` keys may have."""
    return min(MOST_SPLITS, -(-keys // SPLIT))


@njit
def split_size(stop):
    """Return the keys of a split for a row that sees keys up to `stop`."""
    size = SPLIT
    while size * MOST_SPLITS < stop:
        size *= 2
    return size


@njit
def splits_of(first, stop):
    """Return the splits of a row that sees keys from `first` to `stop`."""
    size = split_size(stop)
    return range(first // size, (stop + size - 1) // size)


@njit(fastmath=FAST)
def merge(top, total, values, its_top, its_total, its_values):
    """Merge the softmax of further keys (maximum in base 2, sum, weighted values) into the state so far.

    Updates `values` in place; returns the new maximum and sum.
    """
    new_top = max(top, its_top)
    keep, take = exp((top - new_top) * LN_2), exp((its_top - new_top) * LN_2)
    for lane in range(values.size):
        values[lane] = values[lane] * keep + its_values[lane] * take
    return new_top, total * keep + its_total * take


@ffi.known_again
def target(dtype: str) -> str:
    """Return the name of the custom call for views of this dtype, compiled and registered at its first use.

    Arguments of the call: q ``[rows, kv_heads, q_per_kv, key_width]``; view; layer, block_size, strides of scales
    ``[4]``; tables ``[seqs, pages]``; seq, first and stop ``[rows]``: row r sees keys ``first[r]:stop[r]`` of sequence
    ``seq[r]``; sinks ``[kv_heads, q_per_kv]``, `NO_SINK` where there is none; scale and soft_cap ``[2]``, a cap of 0
    for none; parts ``[parts]``, ascending first rows; splits ``[splits]``, more than one only if each part is a row;
    ended ``[rows * kv_heads, 2]`` zeros. Results: ``[rows, kv_heads, q_per_kv, value_width]``; partial results ``[rows,
    kv_heads, splits, q_per_kv, value_width + 2]``; ended. Where keys fill all tiles of the view, values are their first
    lanes.
    """
    name = f"jpaged_paged_attention_{dtype}"
    ffi.register(name, _compiled(dtype), items_of=((9, 0), (0, 1), (10, 0)), grains=32)
    return name


class _Call(NamedTuple):
    """Holds the arrays of a call."""

    q: np.ndarray
    tables: np.ndarray
    seq: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    sinks: np.ndarray
    parts: np.ndarray
    out: np.ndarray
    partial: np.ndarray


@njit
def _ints(frame, index):
    """Return an argument of one axis of int32."""
    buffer = argument(frame, index)
    return carray(at(buffer), (dimension(buffer, 0),), np.int32)


@njit
def _arrays(frame):
    q, tables = argument(frame, 0), argument(frame, 3)
    rows, heads, group = dimension(q, 0), dimension(q, 1), dimension(q, 2)
    out, partial = result(frame, 0), result(frame, 1)
    return _Call(
        carray(at(q), (rows, heads, group, dimension(q, 3)), np.float32),
        carray(at(tables), (dimension(tables, 0), dimension(tables, 1)), np.int32),
        _ints(frame, 4),
        _ints(frame, 5),
        _ints(frame, 6),
        carray(at(argument(frame, 7)), (heads, group), np.float32),
        _ints(frame, 9),
        carray(at(out), (rows, heads, group, dimension(out, 3)), np.float32),
        carray(
            at(partial), (dimension(partial, 0), heads, dimension(partial, 2), group, dimension(out, 3) + 2), np.float32
        ),
    )


@njit
def _memory(frame, numbers, head):
    """Return the addresses and strides of a head's keys and values."""
    view, (layer, block_size, token_stride, byte_stride) = (
        argument(frame, 1),
        carray(at(argument(frame, 2)), (4,), np.int32),
    )
    key_width, value_width = dimension(argument(frame, 0), 3), dimension(result(frame, 0), 3)
    layers, heads, tiles, rows = dimension(view, 1), dimension(view, 2), dimension(view, 3), dimension(view, 4)
    row_bytes = LANES * numbers.bytes
    tile_stride = rows * row_bytes
    head_stride = tiles * tile_stride
    base = address(view) + (layer * heads + head) * head_stride
    value_lane = key_width if key_width < tiles * LANES else 0
    return Memory(
        base,
        layers * heads * head_stride,
        head_stride,
        tile_stride,
        row_bytes,
        dimension(view, 0),
        int(block_size),
        key_width // HALF,
        value_width // HALF,
        value_lane,
        int(token_stride),
        int(byte_stride),
    )


@njit
def _load(call, row, end, head, scale, scratch):
    """Copy some rows' queries, scaled, to the scratch that `attend` reads; return their number."""
    group, width = call.q.shape[2], call.q.shape[3]
    number = (end - row) * group
    first, stop, queries = (
        words(scratch.first, number),
        words(scratch.stop, number),
        floats(scratch.queries, number * width),
    )
    for n in range(number):
        r, g = row + n // group, n % group
        first[n], stop[n] = call.first[r], call.stop[r]
        for lane in range(width):
            queries[n * width + lane] = call.q[r, head, g, lane] * scale
    return number


@njit
def _found(scratch, number, width):
    """Return the results of `attend`: maxima, sums and weighted values."""
    values = carray(pointer(scratch.values), (number, width), np.float32)
    return floats(scratch.top, number), floats(scratch.total, number), values


@njit(fastmath=FAST)
def _divide(values, total):
    share = f32(1.0) / total if total > 0 else f32(0.0)  # total 0: the query saw no key and its sink is -inf
    for lane in range(values.size):
        values[lane] *= share


@njit
def _after(call, memory, row, head):
    """Return `then` of `attend`, what the thread reads after a row's keys: the next head's keys, or the next row's."""
    stride = memory.head_stride
    if head + 1 < call.q.shape[1]:
        return call.tables[call.seq[row]], np.int64(call.first[row]), np.int64(call.stop[row]), stride
    row = min(row + 1, call.seq.size - 1)
    return call.tables[call.seq[row]], np.int64(call.first[row]), np.int64(call.stop[row]), -head * stride


@njit(error_model="numpy")
def _all_keys(call, numbers, memory, row, end, head, scale, cap, scratch):
    """Compute neighbouring rows of one sequence whose splits have the same size, over all their keys."""
    number, group, table = _load(call, row, end, head, scale, scratch), call.q.shape[2], call.tables[call.seq[row]]
    begin, stop = call.first[row], call.stop[row]
    for r in range(row + 1, end):
        begin, stop = min(begin, call.first[r]), max(stop, call.stop[r])
    size = split_size(stop)
    tops, totals = floats(scratch.all_tops, number), floats(scratch.all_totals, number)
    its_tops, its_totals, its_values = _found(scratch, number, call.out.shape[3])
    for n in range(number):
        tops[n], totals[n] = call.sinks[head, n % group] * LOG2_E, f32(1.0)
        call.out[row + n // group, head, n % group, :] = f32(0.0)
    # Split by split, though one thread takes them all: a row then has the same bits as in a decode, see `split_size`.
    for key in range(begin // size * size, stop, size):
        after = min(stop, key + size)
        then = (
            (table, np.int64(after), np.int64(stop), np.int64(0))
            if after < stop
            else _after(call, memory, end - 1, head)
        )
        attend(memory, numbers, table, number, max(begin, key), after, cap, then, scratch)
        for n in range(number):
            values = call.out[row + n // group, head, n % group]
            tops[n], totals[n] = merge(tops[n], totals[n], values, its_tops[n], its_totals[n], its_values[n])
    for n in range(number):
        _divide(call.out[row + n // group, head, n % group], totals[n])


@njit(error_model="numpy")
def _one_split(call, numbers, memory, ended, row, head, split, scale, cap, scratch):
    """Compute one split of a row's keys; the thread that finishes the row's last split also merges them all."""
    begin, stop = call.first[row], call.stop[row]
    size, splits = split_size(stop), splits_of(begin, stop)
    number = _load(call, row, row + 1, head, scale, scratch)
    low, high = max(begin, split * size), min(stop, (split + 1) * size)
    then = _after(call, memory, row, head)
    if high < stop:
        then = (call.tables[call.seq[row]], np.int64(high), np.int64(stop), np.int64(0))
    attend(memory, numbers, call.tables[call.seq[row]], number, low, high, cap, then, scratch)
    width = call.out.shape[3]
    tops, totals, found = _found(scratch, number, width)
    for n in range(number):
        mine = call.partial[row, head, split, n]
        mine[:width] = found[n]
        mine[width], mine[width + 1] = tops[n], totals[n]
    # An atomic counter for each row and head, in memory that XLA has zeroed. All threads but the last return here.
    if add(ended + (row * call.q.shape[1] + head) * 8, 1) + 1 < len(splits):
        return
    for n in range(number):
        values = call.out[row, head, n]
        values[:] = f32(0.0)
        top, total = call.sinks[head, n] * LOG2_E, f32(1.0)
        for other in splits:
            theirs = call.partial[row, head, other, n]
            top, total = merge(top, total, values, theirs[width], theirs[width + 1], theirs[:width])
        _divide(values, total)


@njit(error_model="numpy")
def _attend(frame, begin_item, end_item, numbers):
    call = _arrays(frame)
    scale, cap = carray(at(argument(frame, 8)), (2,), np.float32)
    if cap == 0:
        scale *= LOG2_E
    splits, ended = dimension(argument(frame, 10), 0), address(result(frame, 2))
    num_rows, num_heads, group, key_width = call.q.shape
    parts = call.parts
    most = num_rows - parts[-1]
    for index in range(parts.size - 1):
        most = max(most, parts[index + 1] - parts[index])
    widths = most * group, key_width, call.out.shape[3]
    # One scratch for all items of this thread: its size depends on the largest part.
    memory_of_scratch = allocate(scratch_bytes(*widths))
    scratch = scratch_at(memory_of_scratch, *widths)
    for item in range(begin_item, end_item):
        head, part, split = item // splits % num_heads, item // splits // num_heads, item % splits
        row = parts[part]
        own = splits_of(call.first[row], call.stop[row]) if splits > 1 else range(1)
        if split not in own if len(own) > 1 else split:
            continue
        memory = _memory(frame, numbers, head)
        if len(own) > 1:
            _one_split(call, numbers, memory, ended, row, head, split, scale, cap, scratch)
            continue
        end = parts[part + 1] if part + 1 < parts.size else num_rows
        # A part may span several sequences; `_all_keys` takes runs of rows of one, with splits of one size.
        while row < end:
            after = row + 1
            size = split_size(call.stop[row])
            while after < end and call.seq[after] == call.seq[row] and split_size(call.stop[after]) == size:
                after += 1
            _all_keys(call, numbers, memory, row, after, head, scale, cap, scratch)
            row = after
    free(memory_of_scratch)


def _float32(frame, begin, end):
    _attend(frame, begin, end, FLOAT32)


def _bfloat16(frame, begin, end):
    _attend(frame, begin, end, BFLOAT16)


def _int8(frame, begin, end):
    _attend(frame, begin, end, INT8)


def _float8(frame, begin, end):
    _attend(frame, begin, end, FLOAT8)


_LOOPS = {"float32": _float32, "bfloat16": _bfloat16, "uint16": _bfloat16, "int8": _int8, "uint8": _float8}


@cache
def _compiled(dtype: str) -> Any:
    loops = ffi.cfunc(ffi.RUN, error_model="numpy")(_LOOPS[dtype])
    note_compiled(dtype)
    return loops
