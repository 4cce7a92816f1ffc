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
from pallas_kernels.cpu_math import FAST, LN_2, LOG2_E, copy, exp, f32, fill
from pallas_kernels.cpu_tiles import FLOAT
from pallas_kernels.ffi import address, argument, dimension, result
from pallas_kernels.ffi import data as at
from pallas_kernels.ffi.loops import njit
from pallas_kernels.ffi.primitives import add, allocate, free, load_int
from pallas_kernels.layout import LANES
from pallas_kernels.paged_attention.cpu import MOST_SPLITS, SPLIT
from pallas_kernels.paged_attention.cpu_kernel import attend
from pallas_kernels.paged_attention.cpu_memory import Memory
from pallas_kernels.paged_attention.cpu_rows import BFLOAT16, FLOAT8, FLOAT32, INT8
from pallas_kernels.paged_attention.cpu_scratch import HALF, floats, scratch_at, scratch_bytes, words


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
    loops = _compiled(_LOOPS[dtype])
    ffi.register(name, loops, items_of=((9, 0), (0, 1), (10, 0)), grains=32)
    return name


class _Call(NamedTuple):
    """Describes the arrays of a call by addresses and sizes, because Numba counts references of arrays at every call,
    and takes seconds to compile that."""

    q: int
    tables: int
    seq: int
    first: int
    stop: int
    sinks: int
    parts: int
    out: int
    partial: int
    rows: int
    heads: int
    group: int
    key_width: int
    value_width: int
    pages: int
    splits: int


@njit
def _arrays(frame):
    q, tables, out, partial = argument(frame, 0), argument(frame, 3), result(frame, 0), result(frame, 1)
    seq, first, stop = argument(frame, 4), argument(frame, 5), argument(frame, 6)
    return _Call(
        address(q),
        address(tables),
        address(seq),
        address(first),
        address(stop),
        address(argument(frame, 7)),
        address(argument(frame, 9)),
        address(out),
        address(partial),
        dimension(q, 0),
        dimension(q, 1),
        dimension(q, 2),
        dimension(q, 3),
        dimension(out, 3),
        dimension(tables, 1),
        dimension(partial, 2),
    )


@njit
def _int(numbers, at):
    """Return one of the int32 at an address."""
    return load_int(numbers + at * FLOAT)


@njit
def _table(call, row):
    """Return the address of the block table of a row's sequence."""
    return call.tables + _int(call.seq, row) * call.pages * FLOAT


@njit
def _query(call, row, head, n):
    place = (row * call.heads + head) * call.group + n
    return floats(call.q + place * call.key_width * FLOAT, call.key_width)


@njit
def _values(call, row, head, n):
    """Return the result of one query."""
    place = (row * call.heads + head) * call.group + n
    return floats(call.out + place * call.value_width * FLOAT, call.value_width)


@njit
def _partial(call, row, head, split, n):
    """Return the weighted values of one query's keys in a split, their maximum and their sum."""
    place, width = ((row * call.heads + head) * call.splits + split) * call.group + n, call.value_width + 2
    return floats(call.partial + place * width * FLOAT, width)


@njit
def _sink(call, head, n):
    return floats(call.sinks + (head * call.group + n) * FLOAT, 1)[0] * LOG2_E


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
    group, width = call.group, call.key_width
    number = (end - row) * group
    first, stop = words(scratch.first, number), words(scratch.stop, number)
    for n in range(number):
        r = row + n // group
        first[n], stop[n] = _int(call.first, r), _int(call.stop, r)
        query, mine = _query(call, r, head, n % group), floats(scratch.queries + n * width * FLOAT, width)
        for lane in range(width):
            mine[lane] = query[lane] * scale
    return number


@njit
def _found(scratch, n, width):
    """Return the results of `attend` for a query: maximum, sum and weighted values."""
    values = floats(scratch.values + n * width * FLOAT, width)
    return floats(scratch.top + n * FLOAT, 1)[0], floats(scratch.total + n * FLOAT, 1)[0], values


@njit(fastmath=FAST)
def _divide(values, total):
    share = f32(1.0) / total if total > 0 else f32(0.0)  # total 0: the query saw no key and its sink is -inf
    for lane in range(values.size):
        values[lane] *= share


@njit
def _after(call, memory, row, head):
    """Return `then` of `attend`, what the thread reads after a row's keys: the next head's keys, or the next row's."""
    further = memory.head_stride
    if head + 1 >= call.heads:
        row, further = min(row + 1, call.rows - 1), -head * memory.head_stride
    return _table(call, row), _int(call.first, row), _int(call.stop, row), further


@njit(error_model="numpy")
def _all_keys(call, numbers, memory, row, end, head, scale, cap, scratch):
    """Compute neighbouring rows of one sequence whose splits have the same size, over all their keys."""
    number, group, table = _load(call, row, end, head, scale, scratch), call.group, _table(call, row)
    begin, stop = _int(call.first, row), _int(call.stop, row)
    for r in range(row + 1, end):
        begin, stop = min(begin, _int(call.first, r)), max(stop, _int(call.stop, r))
    size = split_size(stop)
    tops, totals = floats(scratch.all_tops, number), floats(scratch.all_totals, number)
    for n in range(number):
        tops[n], totals[n] = _sink(call, head, n % group), f32(1.0)
        fill(_values(call, row + n // group, head, n % group), f32(0.0))
    # Split by split, though one thread takes them all: a row then has the same bits as in a decode, see `split_size`.
    for key in range(begin // size * size, stop, size):
        after = min(stop, key + size)
        then = (table, after, stop, 0) if after < stop else _after(call, memory, end - 1, head)
        attend(memory, numbers, table, number, max(begin, key), after, cap, then, scratch)
        for n in range(number):
            top, total, found = _found(scratch, n, call.value_width)
            values = _values(call, row + n // group, head, n % group)
            tops[n], totals[n] = merge(tops[n], totals[n], values, top, total, found)
    for n in range(number):
        _divide(_values(call, row + n // group, head, n % group), totals[n])


@njit(error_model="numpy")
def _one_split(call, numbers, memory, ended, row, head, split, scale, cap, scratch):
    """Compute one split of a row's keys; the thread that finishes the row's last split also merges them all."""
    begin, stop = _int(call.first, row), _int(call.stop, row)
    size, splits, width = split_size(stop), splits_of(begin, stop), call.value_width
    number, table = _load(call, row, row + 1, head, scale, scratch), _table(call, row)
    low, high = max(begin, split * size), min(stop, (split + 1) * size)
    then = (table, high, stop, 0) if high < stop else _after(call, memory, row, head)
    attend(memory, numbers, table, number, low, high, cap, then, scratch)
    for n in range(number):
        mine = _partial(call, row, head, split, n)
        mine[width], mine[width + 1], found = _found(scratch, n, width)
        copy(found, mine)
    # An atomic counter for each row and head, in memory that XLA has zeroed. All threads but the last return here.
    if add(ended + (row * call.heads + head) * 8, 1) + 1 < len(splits):
        return
    for n in range(number):
        values = _values(call, row, head, n)
        fill(values, f32(0.0))
        top, total = _sink(call, head, n), f32(1.0)
        for other in splits:
            theirs = _partial(call, row, head, other, n)
            top, total = merge(top, total, values, theirs[width], theirs[width + 1], theirs)
        _divide(values, total)


@njit(error_model="numpy")
def _attend(frame, begin_item, end_item, numbers):
    call = _arrays(frame)
    scale, cap = carray(at(argument(frame, 8)), (2,), np.float32)
    if cap == 0:
        scale *= LOG2_E
    splits, ended, parts = (
        dimension(argument(frame, 10), 0),
        address(result(frame, 2)),
        dimension(argument(frame, 9), 0),
    )
    most = call.rows - _int(call.parts, parts - 1)
    for index in range(parts - 1):
        most = max(most, _int(call.parts, index + 1) - _int(call.parts, index))
    widths = most * call.group, call.key_width, call.value_width
    # One scratch for all items of this thread: its size depends on the largest part.
    memory_of_scratch = allocate(scratch_bytes(*widths))
    scratch = scratch_at(memory_of_scratch, *widths)
    for item in range(begin_item, end_item):
        head, part, split = item // splits % call.heads, item // splits // call.heads, item % splits
        row = _int(call.parts, part)
        first_split, own = 0, 1
        if splits > 1:
            its = splits_of(_int(call.first, row), _int(call.stop, row))
            first_split, own = its.start, len(its)
        if own > 1 and not first_split <= split < first_split + own:
            continue
        if own <= 1 and split > 0:
            continue
        memory = _memory(frame, numbers, head)
        if own > 1:
            _one_split(call, numbers, memory, ended, row, head, split, scale, cap, scratch)
            continue
        end = _int(call.parts, part + 1) if part + 1 < parts else call.rows
        # A part may span several sequences; `_all_keys` takes runs of rows of one, with splits of one size.
        while row < end:
            after = row + 1
            size, seq = split_size(_int(call.stop, row)), _int(call.seq, row)
            while after < end and _int(call.seq, after) == seq and split_size(_int(call.stop, after)) == size:
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
def _compiled(loops: Any) -> Any:
    """Compile loops once, also where two dtypes have the same."""
    return ffi.cfunc(ffi.RUN, error_model="numpy")(loops)
