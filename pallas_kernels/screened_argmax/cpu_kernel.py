"""Holds the loops of `pallas_kernels.screened_argmax.cpu`, compiled by Numba: one call screens, one multiplies.

Memory. The screen is a table in 8 bits, [panels, quads, 16 rows of the table, 4 inputs], read once a group of `GROUP`
rows of x. Its bounds, [panels, 3, 16], and the upper bounds of a panel's products, [GROUP, 16], stay in the first-level
cache. The table itself, float32, stays in memory; only rows that pass the screen are read.

Loops. The first call rounds the rows of x to digits, then takes panels of the screen, `PANELS_OF_AN_ITEM` per item of
work. It lists each row of the table whose upper bound reaches the best lower bound so far. Threads share that bound
without a lock: if a lower one overwrites it, more rows are listed, never fewer. The second call, with rows of x as
items, drops rows below the final lower bound and multiplies the others, in the order of
`pallas_kernels.matmul.cpu_kernel`.

Digits. Hidden states have a few numbers that are ten and more times as large as the others. With one scale for a row
they would leave the others few digits, so the scale follows the row's norm, and a number that is too large for one
digit has several, of the same scale, whose tiles are multiplied again: a sum of integers does not mind. `GROUP` rows go
through the tiles together, in turns that say which inputs come next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from pallas_kernels import ffi
from pallas_kernels.cpu_dots import FLOATS, KINDS, Emitter, vector
from pallas_kernels.cpu_features import Kind, best_kind, kind_in_registers
from pallas_kernels.cpu_math import f32
from pallas_kernels.cpu_tiles import dots, stack_memory
from pallas_kernels.ffi import address, argument, data, dimension, result
from pallas_kernels.ffi.loops import njit
from pallas_kernels.ffi.primitives import add, allocate, emit_prefetch, free, load, pointer, store
from pallas_kernels.screened_argmax.screen import (
    GROUP,
    INPUTS,
    LARGEST,
    LENGTH,
    LOST,
    MOST_DIGITS,
    OFFSET,
    SCALE,
    SMALLEST,
)
from pallas_kernels.tile_order import OUTPUTS
from pallas_kernels.tiled_matmul.cpu_tiles import FLOAT, TILE_BYTES, repeated

DIGIT = 127
"""The largest digit."""
RANGE = 3.0
"""Largest number of a first digit, in units of the row's root mean square. With less, more tiles are multiplied again;
with more, more words reach the best one's bound. 3 to 4 took the least time with SmolLM2-135M."""
_LOOSE = {"contract", "reassoc", "nsz", "arcp"}


@njit(fastmath=_LOOSE)
def _norms(x):
    """Return a row's largest size and its 2-norm."""
    top, squares = f32(0.0), f32(0.0)
    for lane in range(x.size):
        top = max(top, abs(x[lane]))
        squares += x[lane] * x[lane]
    return top, np.sqrt(squares)


@njit(fastmath=_LOOSE)
def _nearest(x, inverse, scale, near):
    """Round ``x * inverse``; returns the 2-norm of the rounding error, and the sum of the integers."""
    lost, total = f32(0.0), np.int32(0)
    for lane in range(x.size):
        number = np.rint(x[lane] * inverse)
        near[lane] = np.int16(number)
        rest = x[lane] - number * scale
        lost += rest * rest
        total += np.int32(number)
    return np.sqrt(lost), total


@njit(error_model="numpy")
def round_row(x, near, facts, facts_as_int):
    """Round a row to integers and write its facts; returns whether it can be screened."""
    top, norm = _norms(x)
    finite = True
    for lane in range(x.size):
        finite = finite and abs(x[lane]) < f32(LARGEST)
    if not (finite and top > f32(SMALLEST)):
        skip_row(near, facts, facts_as_int)
        return False
    by_norm = f32(RANGE / DIGIT) * norm / np.sqrt(f32(x.size))
    scale = max(by_norm, top * f32(1.0001 / (DIGIT * MOST_DIGITS)))
    lost, total = _nearest(x, f32(1.0) / scale, scale, near)
    facts_as_int[0] = -OFFSET * total
    # Sums of squares in float32 may be too small by a share of about their number of terms.
    facts[1] = norm * f32(1.0001) / scale
    facts[2] = (lost + norm * f32(1e-6)) * f32(1.0001) / scale
    facts[3] = f32(-np.inf)
    return True


@njit
def skip_row(near, facts, facts_as_int):
    """Write zeros, and facts with which nothing is found."""
    for lane in range(near.size):
        near[lane] = 0
    facts_as_int[0] = 0
    facts[1] = f32(0.0)
    facts[2] = f32(0.0)
    facts[3] = f32(np.inf)


@njit
def write_turns(near, inputs, digits, order):
    """Cut the integers of a group's rows into digits.

    Args:
        near: int16 [GROUP, inputs]; zeros afterwards.
        digits: address of int8 [turns, GROUP, INPUTS].
        order: address of int32: the number of turns, and which tile each is of.
    """
    steps, count = carray(pointer(order), (1 + most_turns_of(inputs),), np.int32), 0
    for quad in range(inputs // INPUTS):
        left = True
        while left:
            left = False
            out = carray(pointer(digits + count * GROUP * INPUTS), (GROUP, INPUTS), np.int8)
            for row in range(GROUP):
                for place in range(INPUTS):
                    number = near[row, quad * INPUTS + place]
                    digit = max(-DIGIT, min(DIGIT, number))
                    out[row, place] = np.int8(digit)
                    near[row, quad * INPUTS + place] = np.int16(number - digit)
                    left = left or number != digit
            steps[1 + count] = quad
            count += 1
    steps[0] = count


@njit
def most_turns_of(inputs):
    """Do as `screen.most_turns`, in loops."""
    return MOST_DIGITS * (inputs // INPUTS)


_BYTE, _SHORT, _INT, _WORD, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
WORDS_BYTES = 3 * OUTPUTS * FLOAT
"""Bytes of `Screen.words` of a panel."""
FACTS_BYTES = 16
"""Bytes of a row's facts, see `cpu.FACTS`."""


def bounds(kind: Kind, rows: int, panels: int) -> Any:
    """Return ``f(digits, order, facts, codes, panel_bytes, words, upper, coming) -> reached``, to be called from
    compiled loops.

    upper [rows, panels * 16], float32, gets a bound that no product of these rows and panels exceeds, in units of the
    rows' scales; `reached` is not 0 where one is no less than its row's best lower bound, or is not a number. Arguments
    are addresses: `digits` of the first of these rows in the group's first turn, `order` of the number of turns and
    their tiles, `coming` of panels to prefetch.
    """
    dots = KINDS[kind]

    @intrinsic
    def tile(typingctx, digits, order, facts, codes, panel_bytes, words, upper, coming):
        def generate(context, builder, signature, args):
            digits, order, facts, codes, panel_bytes, words, upper, coming = args
            emit = Emitter(builder)
            of_panels = [emit.at(codes, emit.times(panel_bytes, panel)) for panel in range(panels)]
            following = [emit.at(coming, emit.times(panel_bytes, panel)) for panel in range(panels)]

            def turn(number: ir.Value, flat: list[ir.Value]) -> list[ir.Value]:
                own = emit.load(emit.at(order, emit.times(emit.at(number, 1), FLOAT)), _INT)
                offset = emit.times(builder.zext(own, _WORD), TILE_BYTES)
                for panel in following:
                    emit_prefetch(builder, emit.at(panel, offset))
                loaded = [emit.load(emit.at(panel, offset), vector(_BYTE, TILE_BYTES)) for panel in of_panels]
                tiles = [dots.tile(emit, codes) for codes in loaded]
                mine, out = emit.at(digits, emit.times(number, GROUP * INPUTS)), list(flat)
                for row in range(rows):
                    four = dots.four(emit, emit.at(mine, row * INPUTS))
                    for panel, codes in enumerate(tiles):
                        at = (row * panels + panel) * dots.pieces
                        out[at : at + dots.pieces] = dots.add(emit, out[at : at + dots.pieces], codes, four)
                return out

            zeros = [emit.constant(dots.piece, 0)] * (rows * panels * dots.pieces)
            sums = repeated(emit, builder.zext(emit.load(order, _INT), _WORD), zeros, turn)

            def of_words(panel: int, which: int) -> ir.Value:
                return emit.load(emit.at(words, panel * WORDS_BYTES + which * OUTPUTS * FLOAT), FLOATS)

            reached = ir.Constant(_SHORT, 0)
            for row in range(rows):
                offset, norm, lost, best = (
                    emit.spread(emit.load(emit.at(facts, row * FACTS_BYTES + at * FLOAT), number), OUTPUTS)
                    for at, number in enumerate((_INT, _FLOAT, _FLOAT, _FLOAT))
                )
                for panel in range(panels):
                    at = (row * panels + panel) * dots.pieces
                    whole = builder.add(dots.totals(emit, sums[at : at + dots.pieces]), offset)
                    near = builder.fmul(builder.sitofp(whole, FLOATS), of_words(panel, SCALE))
                    radius = builder.fadd(
                        builder.fmul(of_words(panel, LOST), norm), builder.fmul(of_words(panel, LENGTH), lost)
                    )
                    above = builder.fadd(near, radius)
                    emit.store(above, emit.at(upper, (row * panels + panel) * OUTPUTS * FLOAT))
                    mask = builder.bitcast(builder.fcmp_unordered(">=", above, best), _SHORT)
                    reached = builder.or_(reached, mask)
            return builder.zext(reached, _WORD)

        return types.intp(*[types.intp] * 8), generate

    return tile


PANELS_OF_AN_ITEM = 24
"""Panels of an item of work: 384 rows of the table."""
KIND = kind_in_registers(best_kind())
"""The instructions that multiply."""
WIDE = KIND == "vnni512"
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
    """Return the name of the custom call that lists, for each row of x, the rows of the table that may have the largest
    product: ``(x [rows, inputs], [wanted, outputs], codes, words) -> (digits, order, facts, listed [rows, most, 2],
    counts [rows, 2])``; see `cpu.screened`."""
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
    several, one = bounds(KIND, TOGETHER, panels), bounds(KIND, 1, panels)

    @njit
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
    scratch = stack_memory(TILE_BYTES)
    product = carray(pointer(scratch), (1,), np.float32)
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
                scratch,
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
