"""Holds the loops of `pallas_kernels.paged_attention.cpu`, compiled by Numba for the machine they run on.

Queries of neighbouring tokens of a sequence read their keys together, span by span: the scores of a span, the online
softmax of FlashAttention-2 (arXiv 2307.08691, algorithm 1), and the weighted sum of the span's values. Every sum is
over a row's own keys, and cut where the row's own position says: bits do not depend on the batch.

Memory. The pool, [blocks, layers, KV heads, tiles, block_size, 128], is read where it lies; nothing is donated. A
thread's scratch, some hundred KiB in the second-level cache, holds for the queries of a block of rows (`cpu_scratch`):

    queries  float32 [queries, key width]     loaded once, scaled
    keys     float32 [key width, SPAN]        one span's keys, transposed: a vector is one number of several keys
    weights  float32 [TOGETHER, SPAN]         scores, then their exponentials, of some queries
    top, total, shrink  float32 [queries]     softmax so far, and by how much older values shrink
    values   float32 [queries, value width]   weighted values so far
    rows     int64 [2, SPAN]                  addresses of the span's tokens in the pool, and of their blocks
    coming   int64 [2, SPAN]                  the same of the next span, whose rows are prefetched

    block table:   7        2        9          a span is SPAN = 64 keys, whatever the size of a block
    pool:       [k k k k][k k k k][k k k .]     `cpu_memory` finds the rows, `cpu_rows` transposes keys
                     |--- a span ----|
    keys        [key width, 64]     scores = queries . keys        `cpu_block`, 6 queries x some vectors in registers
    weights     [24, 64]            exponentials, new top, shrink  `cpu_softmax`
    values      [queries, width]    = values * shrink + weights . (64 rows of values)        `cpu_block`

Loops, from outside: items of work (`cpu_call`: a KV head of some queries, or one split of one query's keys), which
XLA's threads share; splits of a long context, in order; spans of SPAN keys; TOGETHER queries; halves of 64 lanes of a
value; tiles of up to six queries by a few vectors, whose sums stay in registers. While a span is computed, the next
one's rows are prefetched: they lie all over the pool, where the processor does not fetch ahead by itself. Threads do
not wait for one another: the one that finishes a decode's last split merges all of them (`cpu_call`).
"""

from __future__ import annotations

from pallas_kernels.cpu_math import FAST, LOG2_E, f32, fill, tanh
from pallas_kernels.cpu_tiles import FLOAT
from pallas_kernels.ffi.loops import njit
from pallas_kernels.paged_attention.cpu import NO_SINK
from pallas_kernels.paged_attention.cpu_block import MOST, add_few_values, add_values, scores, takes_few
from pallas_kernels.paged_attention.cpu_memory import (
    fetch_values,
    find_rows,
    find_value_scales,
    load_keys,
    load_values,
    value_offset,
    values_at,
)
from pallas_kernels.paged_attention.cpu_scratch import HALF, HIDDEN, SPAN, TOGETHER, WORD, floats, words
from pallas_kernels.paged_attention.cpu_softmax import exponentials


@njit(fastmath=FAST)
def _cap_scores(scores, cap):
    """Replace each score by ``cap * tanh(score / cap)``, in units of log 2."""
    for key in range(scores.size):
        scores[key] = cap * LOG2_E * tanh(scores[key] / cap)


@njit
def _hide_range(scores, begin, end):
    """Hide the keys from `begin` to `end`, a range that may reach beyond the scores."""
    for key in range(max(begin, 0), min(end, scores.size)):
        scores[key] = HIDDEN


@njit
def _hide(weights, number, first, stop, begin, end, key_0):
    """Hide the keys of the span that each row does not see."""
    first, stop = words(first, number), words(stop, number)
    for n in range(number):
        mine = floats(weights + n * SPAN * FLOAT, SPAN)
        _hide_range(mine, 0, max(begin, first[n]) - key_0)
        _hide_range(mine, min(end, stop[n]) - key_0, SPAN)


@njit
def _hide_holes(weights, number, found, nothing):
    """Hide, from all rows, the keys whose blocks do not exist."""
    rows = words(found, SPAN)
    for n in range(number):
        mine = floats(weights + n * SPAN * FLOAT, SPAN)
        for key in range(SPAN):
            if rows[key] == nothing:
                mine[key] = HIDDEN


@njit
def _range(address, number, low, high):
    """Return the least and the greatest of some numbers, clipped to `high` and `low` respectively."""
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
    fill(top, NO_SINK)
    fill(total, f32(0.0))
    fill(values, f32(0.0))


@njit
def _take_softmax(memory, scratch, rows, key_0, seen, at, number, cap, holes):
    """Compute the weights of some queries for a span in ``scratch.weights``, and update the queries' maxima and sums.

    Returns False, and computes nothing, if no query sees a key of the span.

    Args:
        seen: the keys that any query sees, from the first to the end.
        at: the first of the queries.
        holes: whether blocks of the span do not exist.
    """
    begin, end = seen
    first, stop, weights, each = scratch.first + at * WORD, scratch.stop + at * WORD, scratch.weights, at * FLOAT
    least_first, last_first = _range(first, number, begin, end)
    least_stop, last_stop = _range(stop, number, begin, end)
    # Neither causality nor a window lets any of these queries see the span.
    if last_stop <= key_0 or least_first >= key_0 + SPAN:
        return False
    key_width = memory.key_halves * HALF
    scores(scratch.queries + each * key_width, key_width, scratch.keys, weights, number)
    if cap > 0:
        _cap_scores(floats(weights, number * SPAN), cap)
    # Most spans of a long context are seen whole by all queries and are not looked at key by key.
    if last_first > key_0 or least_stop < key_0 + SPAN:
        _hide(weights, number, first, stop, begin, end, key_0)
    if holes:
        _hide_holes(weights, number, rows, scratch.nothing)
    exponentials(weights, scratch.top + each, scratch.total + each, scratch.shrink, number)
    return True


@njit(error_model="numpy")
def attend(memory, numbers, table, number, begin, end, cap, then, scratch):
    """Compute maxima, sums and weighted values of the first `number` queries in `scratch`, from the initial state, over
    the keys from `begin` to `end` that each of them sees.

    `then` describes what this thread reads next: a table, the first key, the end of the keys, and the offset of its
    head in bytes. Its first span is prefetched during the last span of this call.
    """
    value_width = memory.value_halves * HALF
    few = takes_few(numbers) and number <= MOST
    in_place = few or numbers.bytes == FLOAT
    _begin(scratch, number, value_width)
    rows, coming, key_0 = scratch.rows, scratch.coming, begin // SPAN * SPAN
    partly, holes = find_rows(memory, table, key_0, begin, end, scratch.nothing, rows)
    # Two lists of rows take turns: those of this span, and those of the next one, which are prefetched. After
    # the last span that is the first span of what the thread reads next, which `then` says.
    while key_0 < end:
        following, then_partly, then_holes, further = key_0 + SPAN, False, False, 0
        if following < end:
            then_partly, then_holes = find_rows(memory, table, following, begin, end, scratch.nothing, coming)
        else:
            its_table, its_begin, its_end, further = then
            first = its_begin // SPAN * SPAN
            find_rows(memory, its_table, first, its_begin, its_end, scratch.nothing, coming)
        keys = min(SPAN, end - key_0)
        # Keys become float32 and are transposed once for all queries of the block. Values are read where they lie if
        # they are float32, or if so few queries read them that converting them first would cost more.
        load_keys(memory, numbers, rows, keys, partly, coming, further, scratch)
        load_values(memory, numbers, rows, keys, partly, in_place, scratch)
        # Weights of more queries would push the keys out of the first-level cache.
        for at in range(0, number, TOGETHER):
            some = min(TOGETHER, number - at)
            if not _take_softmax(memory, scratch, rows, key_0, (begin, end), at, some, cap, holes):
                continue
            if at == 0:
                fetch_values(memory, numbers, coming, further, keys if few else 0)
            for half in range(memory.value_halves):
                values, offset = values_at(memory, rows, partly, half, in_place, scratch)
                to, weights = scratch.values + (at * value_width + half * HALF) * FLOAT, scratch.weights
                if few:
                    held = values, offset, coming, further + value_offset(memory, half)
                    scales = find_value_scales(memory, rows, half, scratch)
                    add_few_values(numbers, weights, held, keys, to, value_width, scratch.shrink, scales, some)
                else:
                    add_values(weights, values, offset, keys, to, value_width, scratch.shrink, some)
        rows, coming, partly, holes = coming, rows, then_partly, then_holes
        key_0 = following
