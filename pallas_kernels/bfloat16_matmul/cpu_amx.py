"""Multiplies rounded rows with panels of bfloat16 tiles by Intel's AMX, a processor's unit for products of tiles.

A panel is already what AMX reads: one of its tiles is 16 pairs of inputs by 16 outputs, that is 16 successive rows
of a panel, 1,024 bytes. Registers hold, while a panel pair is multiplied with up to 32 rows::

                     columns 6   columns 7        tile 4, 5: 16 rows of x by 32 inputs, 64 bytes of each row
    rows of x, 4     sums 0      sums 1           tile 6, 7: 16 pairs of inputs by 16 outputs
    the next 16, 5   sums 2      sums 3           tile 0-3:  16 rows by 16 outputs, float32

A sum begins with 0 or with what `out` holds, and has 32 inputs added by each step, in the order of the inputs. So a
row's bits depend neither on the other rows nor on how many there are: fewer rows only leave rows of tiles out.

Loops, outermost first: `ROWS` rows of x by `STEPS` steps, which stay in the second cache; the panel pairs of an item;
32 rows; steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.bfloat16_matmul.cpu_tiles import LANES
from pallas_kernels.cpu_amx import CONFIG_BYTES, ROW_BYTES, TILE_ROWS, TileCode, configure, release
from pallas_kernels.cpu_panels import copy_numbers
from pallas_kernels.cpu_tiles import stack_memory
from pallas_kernels.ffi.loops import njit
from pallas_kernels.ffi.primitives import store
from pallas_kernels.tiled_matmul.cpu_tiles import FLOAT, TILE_BYTES, repeated

TOGETHER = 2
"""Panels, and tiles of rows, whose sums are in registers at once."""
ROWS, STEPS = 256, 64
"""Rows and steps of a block: their part of x is at most 1 MiB."""
STEP_BYTES = TILE_ROWS * TILE_BYTES
"""Bytes of a panel that a step multiplies, as many pairs of inputs as a tile has rows."""

# A thread's own memory: sizes of tiles for 32 rows and for the last rows, 32 rows of 16 sums, a step of two panels.
_FULL, _LAST, _ASIDE, _PADDED = 0, CONFIG_BYTES, 2 * CONFIG_BYTES, 2 * CONFIG_BYTES + 2 * STEP_BYTES
_OWN_BYTES = _PADDED + 2 * STEP_BYTES
_WORD = ir.IntType(64)


def tile_product(row_tiles: int, panels: int) -> Any:
    """Return ``f(x, x_stride, w, w_panel, steps, out, out_stride, more)``, to be called from compiled loops.

    out [rows, panels * 16], float32, gets the product of one or two tiles of rows with one or two panels, or has it
    added where `more` is not 0. Strides and ``w_panel`` are bytes. The tiles are configured before, which says how
    many rows there are.
    """

    @intrinsic
    def product(typingctx, x, x_stride, w, w_panel, steps, out, out_stride, more):
        def generate(context, builder, signature, args):
            emit_tile_product(TileCode(builder), row_tiles, panels, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), generate

    return product


def emit_tile_product(emit: TileCode, row_tiles: int, panels: int, *arguments: ir.Value) -> None:
    """Append the instructions of `tile_product`."""
    x, x_stride, w, w_panel, steps, out, out_stride, more = arguments
    builder = emit.builder
    x_tiles = [emit.at(x, emit.times(x_stride, TILE_ROWS * tile)) for tile in range(row_tiles)]
    w_tiles = [emit.at(w, emit.times(w_panel, panel)) for panel in range(panels)]
    sums = {
        TOGETHER * tile + panel: emit.at(out, emit.times(out_stride, TILE_ROWS * tile), panel * LANES * FLOAT)
        for tile in range(row_tiles)
        for panel in range(panels)
    }
    with builder.if_else(builder.icmp_signed("!=", more, ir.Constant(_WORD, 0))) as (added, new):
        with added:
            for tile, address in sums.items():
                emit.load_tile(tile, address, out_stride)
        with new:
            for tile in sums:
                emit.tile("tilezero", tile)

    def one_step(step: ir.Value, unchanged: list[ir.Value]) -> list[ir.Value]:
        for panel, address in enumerate(w_tiles):
            at = emit.at(address, emit.times(step, STEP_BYTES))
            emit.load_tile(6 + panel, at, ir.Constant(_WORD, TILE_BYTES))
        for tile, address in enumerate(x_tiles):
            emit.load_tile(4 + tile, emit.at(address, emit.times(step, TILE_BYTES)), x_stride)
            for panel in range(panels):
                emit.tile("tdpbf16ps", TOGETHER * tile + panel, 4 + tile, 6 + panel)
        return unchanged

    repeated(emit, steps, [], one_step)
    for tile, address in sums.items():
        emit.store_tile(tile, address, out_stride)


def panels_product(products: Sequence[Any], configure: Any, release: Any) -> Any:
    """Return the product of any number of rows and the panels from one to another, as a compiled function.

    Args:
        products: what `tile_product` gives for two tiles of rows and two panels, for two and one, one and two, one and
            one.
        configure, release: of `pallas_kernels.cpu_amx`, or what stands for them where no processor has AMX.
    """
    two_by_two, two_by_one, one_by_two, one_by_one = products

    @njit
    def some_rows(x, x_stride, rows, w, w_panel, panels, steps, out, stride, more):
        """Multiply up to 32 rows with one or two panels."""
        if rows > TILE_ROWS:
            if panels > 1:
                two_by_two(x, x_stride, w, w_panel, steps, out, stride, more)
            else:
                two_by_one(x, x_stride, w, w_panel, steps, out, stride, more)
        elif panels > 1:
            one_by_two(x, x_stride, w, w_panel, steps, out, stride, more)
        else:
            one_by_one(x, x_stride, w, w_panel, steps, out, stride, more)

    @njit
    def narrow(x, x_stride, rows, w, steps, out, stride, width, more, aside):
        """Multiply up to 32 rows with the last panel, of which `out` has only `width` columns."""
        for row in range(rows if more else 0):
            copy_numbers(out + row * stride, aside + row * TILE_BYTES, width)
        some_rows(x, x_stride, rows, w, 0, 1, steps, aside, TILE_BYTES, more)
        for row in range(rows):
            copy_numbers(aside + row * TILE_BYTES, out + row * stride, width)

    @njit
    def block(x, x_stride, rows, w, w_panel, panels, steps, out, stride, width, more, own):
        """Multiply up to `ROWS` rows with one or two panels and some steps; `width` columns are left in `out`."""
        per_turn = TOGETHER * TILE_ROWS
        full = rows - rows % per_turn
        for row in range(0, rows, per_turn):
            if row == 0 and full:
                configure(own + _FULL)
            elif row == full:
                configure(own + _LAST)
            mine, to, number = x + row * x_stride, out + row * stride, min(per_turn, rows - row)
            if width < LANES:
                narrow(mine, x_stride, number, w, steps, to, stride, width, more, own + _ASIDE)
            else:
                some_rows(mine, x_stride, number, w, w_panel, panels, steps, to, stride, more)

    @njit
    def multiply_panels(x, x_stride, rows, matrix, pairs, panel, stop, to, outputs, scratch):
        """Multiply any number of rows with the panels from one to another.

        Rows of x are rounded, whole steps of 32 inputs long, with zeros after the last one. Inputs beyond the last
        whole step are multiplied as a step of a copy with zeros.
        """
        w_panel, stride, per_turn = pairs * TILE_BYTES, outputs * FLOAT, TOGETHER * TILE_ROWS
        steps, left, own = pairs // TILE_ROWS, pairs % TILE_ROWS, stack_memory(_OWN_BYTES)
        write_sizes(own + _FULL, per_turn)
        for first in range(0, rows, ROWS):
            number = min(ROWS, rows - first)
            write_sizes(own + _LAST, number % per_turn)
            for at in range(0, max(steps, 1), STEPS):
                depth, now, mine = min(STEPS, steps - at), panel, x + first * x_stride + at * TILE_BYTES
                while now < stop:
                    width = outputs - now * LANES
                    panels = 2 if stop - now > 1 and width >= 2 * LANES else 1
                    w, out = matrix + now * w_panel + at * STEP_BYTES, to + first * stride + now * TILE_BYTES
                    theirs, apart, turns, more = mine, w_panel, depth, at
                    for part in range(2 if left and at + depth == steps else 1):
                        if part == 1:
                            w, copies = w + depth * STEP_BYTES, own + _PADDED
                            for which in range(panels):
                                copy_numbers(w + which * w_panel, copies + which * STEP_BYTES, left * LANES)
                                end = copies + which * STEP_BYTES + left * TILE_BYTES
                                clear_numbers(end, (TILE_ROWS - left) * LANES)
                            theirs, w, apart, turns, more = mine + depth * TILE_BYTES, copies, STEP_BYTES, 1, steps
                        if turns:
                            block(theirs, x_stride, number, w, apart, panels, turns, out, stride, width, more, own)
                    now += panels
        release()

    return multiply_panels


@cache
def multiply_by_amx() -> Any:
    """Return `panels_product` by AMX, to be called where `pallas_kernels.cpu_features.has_amx`."""
    products = [tile_product(row_tiles, panels) for row_tiles in (2, 1) for panels in (2, 1)]
    return panels_product(products, configure, release)


@njit
def write_sizes(to, rows):
    """Write the sizes of tiles for up to 32 rows."""
    upper, lower = min(rows, TILE_ROWS), max(0, rows - TILE_ROWS)
    full, wide = TILE_ROWS, ROW_BYTES
    below = wide if lower else 0
    store(to, 1)
    store(to + 8, 0)
    store(to + 16, wide | wide << 16 | below << 32 | below << 48)
    store(to + 24, wide | below << 16 | wide << 32 | wide << 48)
    store(to + 32, 0)
    store(to + 40, 0)
    store(to + 48, upper | upper << 8 | lower << 16 | lower << 24 | upper << 32 | lower << 40 | full << 48 | full << 56)
    store(to + 56, 0)


@njit
def clear_numbers(to, number):
    """Set some numbers of four bytes to 0."""
    for place in range(0, number, 2):
        store(to + place * FLOAT, 0)
