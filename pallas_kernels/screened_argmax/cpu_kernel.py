"""Holds the loops of `pallas_kernels.screened_argmax.cpu`, compiled by Numba: one call screens, one multiplies.

The first call rounds the rows of x, then takes panels of the screen, `PANELS_OF_AN_ITEM` per item of work. It lists
each row of the table whose upper bound reaches the best lower bound so far. Threads share that bound without a lock: if
a lower one overwrites it, more rows are listed, never fewer. The second call drops rows below the final lower bound and
multiplies the others, in the order of `pallas_kernels.matmul.cpu_kernel`.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from pallas_kernels import ffi
from pallas_kernels.cpu_dots import best_kind
from pallas_kernels.cpu_tiles import FLOAT, dots, stack_memory
from pallas_kernels.ffi import address, argument, data, dimension, result
from pallas_kernels.ffi.primitives import add, allocate, free, load, pointer, store
from pallas_kernels.paged_attention.cpu_math import f32
from pallas_kernels.screened_argmax.cpu_rounding import GROUP, INPUTS, round_row, skip_row, write_turns
from pallas_kernels.screened_argmax.cpu_tiles import FACTS_BYTES, WORDS_BYTES, bounds
from pallas_kernels.screened_argmax.screen import LENGTH, LOST
from pallas_kernels.tile_order import OUTPUTS
from pallas_kernels.tiled_matmul.cpu_tiles import TILE_BYTES

PANELS_OF_AN_ITEM = 24
"""Panels of an item of work: 384 rows of the table."""
WIDE = best_kind() == "vnni512"
PANELS = 3 if WIDE else 1
"""Panels that rows are multiplied with at once."""
TOGETHER = GROUP if WIDE else 4
"""Rows of a tile."""
FEW = 4 if WIDE else 2
"""Rows that go one by one: a tile of `TOGETHER` would take longer."""
UPPER_BYTES = GROUP * PANELS * TILE_BYTES
"""Bytes of the bounds of a tile."""
ENTRY_BYTES = 8
"""Bytes of what is listed: a row of the table, and its upper bound."""
COUNT_BYTES = 8
"""Bytes of how many are listed for a row of x, or would be if there were room."""


@ffi.known_again
def screen_target() -> str:
    """Return the name of the custom call ``(x [rows, inputs], [wanted, outputs], codes, words) -> (digits, order,
    facts, listed [rows, most, 2], counts [rows, 2])``; see `cpu.screened`."""
    name = "jpaged_screen"
    ffi.register(name, _screen, items_of=((2, 0),), portion=PANELS_OF_AN_ITEM, before=(_round, 0, 0))
    return name


@ffi.known_again
def exact_target() -> str:
    """Return the name of the custom call ``(x, [wanted, outputs], table, facts, listed, counts) -> (places, whether
    each was found, how many rows of the table were multiplied)``, each int32 [rows]."""
    name = "jpaged_screened"
    ffi.register(name, _exact, items_of=((0, 0),))
    return name


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _round(frame, begin, end):
    """Round the groups of rows that begin from `begin` to `end`."""
    first = argument(frame, 0)
    rows, inputs, turns = dimension(first, 0), dimension(first, 1), dimension(result(frame, 0), 1)
    wanted = min(rows, carray(data(argument(frame, 1)), (2,), np.int32)[0])
    most = dimension(result(frame, 3), 1)
    for start in range(begin, end):
        if start % GROUP != 0:
            continue
        memory = allocate(GROUP * inputs * 2)
        near = carray(pointer(memory), (GROUP, inputs), np.int16)
        for row in range(start, start + GROUP):
            beside = pointer(address(result(frame, 2)) + row * FACTS_BYTES)
            facts, as_int = carray(beside, (4,), np.float32), carray(beside, (1,), np.int32)
            if row < wanted:
                x = carray(pointer(address(first) + row * inputs * FLOAT), (inputs,), np.float32)
                screened = round_row(x, near[row - start], facts, as_int)
            else:
                skip_row(near[row - start], facts, as_int)
                screened = True
            if row < rows:
                store(address(result(frame, 4)) + row * COUNT_BYTES, 0 if screened else most + 1)
        group = start // GROUP
        digits = address(result(frame, 0)) + group * turns * GROUP * INPUTS
        write_turns(near, inputs, digits, address(result(frame, 1)) + group * (turns + 1) * FLOAT)
        free(memory)


def _by_panels(panels):
    """Return the screening of a group of rows by so many panels, as a compiled function."""
    several, one = bounds(best_kind(), TOGETHER, panels), bounds(best_kind(), 1, panels)

    @ffi.njit_named(f"screen_{best_kind()}_{panels}")
    def screen(digits, order, facts, rows, codes, panel_bytes, words, upper, coming, lists):
        row = 0
        while row < rows:
            mine, beside = digits + row * INPUTS, facts + row * FACTS_BYTES
            if rows - row > FEW:
                count = TOGETHER
                reached = several(mine, order, beside, codes, panel_bytes, words, upper, coming)
            else:
                count = 1
                reached = one(mine, order, beside, codes, panel_bytes, words, upper, coming)
            if reached != 0:
                _list(row, min(count, rows - row), panels, beside, words, upper, lists)
            row += count

    return screen


@njit
def _list(first, rows, panels, facts, words, upper, lists):
    """List what reaches the best lower bounds of rows from the group's `first` on, and raise these."""
    entries, counts, most, place, stop = lists
    for row in range(rows):
        best = carray(pointer(facts + row * FACTS_BYTES), (4,), np.float32)
        for panel in range(panels):
            at = place + panel * OUTPUTS
            above = carray(pointer(upper + (row * panels + panel) * OUTPUTS * FLOAT), (OUTPUTS,), np.float32)
            of_words = carray(pointer(words + panel * WORDS_BYTES), (3, OUTPUTS), np.float32)
            for lane in range(min(OUTPUTS, stop - at)):
                if above[lane] < best[3]:
                    continue
                radius = of_words[LOST, lane] * best[1] + of_words[LENGTH, lane] * best[2]
                below = above[lane] - f32(2.0) * radius
                if below > best[3]:
                    best[3] = below
                number = add(counts + (first + row) * COUNT_BYTES, 1)
                if number < most:
                    entry = pointer(entries + ((first + row) * most + number) * ENTRY_BYTES)
                    carray(entry, (2,), np.int32)[0] = at + lane
                    carray(entry, (2,), np.float32)[1] = above[lane]


_several, _single = _by_panels(PANELS), _by_panels(1)


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _screen(frame, begin, end):
    first, codes, words = argument(frame, 0), argument(frame, 2), argument(frame, 3)
    rows, panels = dimension(first, 0), dimension(codes, 0)
    wanted, outputs = carray(data(argument(frame, 1)), (2,), np.int32)
    turns, most = dimension(result(frame, 0), 1), dimension(result(frame, 3), 1)
    panel_bytes = dimension(codes, 1) * TILE_BYTES
    upper = stack_memory(UPPER_BYTES)
    panel, end_of_item = begin * PANELS_OF_AN_ITEM, min(end * PANELS_OF_AN_ITEM, panels)
    while panel < end_of_item:
        together = PANELS if end_of_item - panel >= PANELS else 1
        mine, beside = address(codes) + panel * panel_bytes, address(words) + panel * WORDS_BYTES
        coming = mine + together * panel_bytes
        for start in range(0, min(rows, wanted), GROUP):
            group, place, live = start // GROUP, panel * OUTPUTS, min(GROUP, min(rows, wanted) - start)
            digits = address(result(frame, 0)) + group * turns * GROUP * INPUTS
            order = address(result(frame, 1)) + group * (turns + 1) * FLOAT
            facts = address(result(frame, 2)) + start * FACTS_BYTES
            entries = address(result(frame, 3)) + start * most * ENTRY_BYTES
            counts = address(result(frame, 4)) + start * COUNT_BYTES
            lists = entries, counts, most, place, outputs
            if together == PANELS:
                _several(digits, order, facts, live, mine, panel_bytes, beside, upper, coming, lists)
            else:
                _single(digits, order, facts, live, mine, panel_bytes, beside, upper, coming, lists)
        panel += together


_dot = dots(1, 1)


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _exact(frame, begin, end):
    first, table, facts = argument(frame, 0), argument(frame, 2), argument(frame, 3)
    entries, counts = argument(frame, 4), argument(frame, 5)
    rows, inputs, most = dimension(first, 0), dimension(first, 1), dimension(entries, 1)
    wanted = min(rows, carray(data(argument(frame, 1)), (2,), np.int32)[0])
    room = stack_memory(TILE_BYTES)
    product = carray(pointer(room), (1,), np.float32)
    for row in range(begin, end):
        listed = load(address(counts) + row * COUNT_BYTES) if row < wanted else 0
        least = carray(pointer(address(facts) + row * FACTS_BYTES), (4,), np.float32)[3]
        top, place, tried, found = f32(-np.inf), 0, 0, listed <= most
        for number in range(listed if found else 0):
            entry = pointer(address(entries) + (row * most + number) * ENTRY_BYTES)
            if carray(entry, (2,), np.float32)[1] < least:
                continue
            word = carray(entry, (2,), np.int32)[0]
            _dot(
                address(first) + row * inputs * FLOAT,
                0,
                address(table) + word * inputs * FLOAT,
                0,
                inputs,
                room,
                0,
                0,
                0,
            )
            tried += 1
            found = found and product[0] == product[0]
            if product[0] > top or tried == 1 or (product[0] == top and word < place):
                top, place = product[0], word
        carray(data(result(frame, 0)), (rows,), np.int32)[row] = place
        complete = found and (tried > 0 or row >= wanted)
        carray(data(result(frame, 1)), (rows,), np.int32)[row] = 1 if complete else 0
        carray(data(result(frame, 2)), (rows,), np.int32)[row] = tried
