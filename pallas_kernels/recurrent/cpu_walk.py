"""Walks over the units of a batch for `pallas_kernels.recurrent.cpu`, in loops that Numba compiles.

Memory. A tile of a state is [rows, columns] in float32: all rows of the axis that outputs sum over, and some columns.
In the pool a tile's rows lie `stride` numbers apart. Decodes update tiles in place in the pool. Other units update a
copy in the thread's own memory, which goes to the pool after each unit that has a block to write.

Loops. For decodes, each tile of each state is an item of work. For other units, an item is one tile position: the loop
walks over all units in order, as a unit may continue from the state of the unit before it, and inside over the unit's
tokens, unless the unit is computed as a piece.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from pallas_kernels import ffi
from pallas_kernels.cpu_math import copy, f32, fill
from pallas_kernels.cpu_tiles import FLOAT
from pallas_kernels.ffi import address, argument, data, dimension, elements, result
from pallas_kernels.ffi.loops import njit
from pallas_kernels.ffi.primitives import allocate, free, pointer
from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.cpu_products import floats, scratch_at, scratch_bytes
from pallas_kernels.recurrent.layout import NEW

_OPERANDS = 7
"""Arguments before a kernel's own."""


def register(kernel: str, operands_of: Any, token: Any, piece: Any) -> tuple[str, str]:
    """Define the custom calls of a kernel, for its decodes and for its other units, and return their names.

    Arguments: the view; numbers int32 ``[layer, first row of the part, first unit, end of the units, rows, stride and
    width of a tile, whether tokens go one by one, whether all units are decodes]``, where rows of a tile are `stride`
    numbers apart; start, length, read and write of the units; the tiles' first numbers in a state; operands and
    constants as the kernel's module says; the output of earlier calls, if any. Results: the view, aliased to the first
    argument, and the output, aliased to the last argument if that is given. Output rows after the last unit are
    cleared, by the decodes' call if all units are decodes.

    Args:
        operands_of: returns the operands and constants of a call, one of the functions `four_operands` to
            `six_operands`.
        token: updates a tile by a token, ``f(state, at, token, operands, out, rows)``. `state` has the tile's rows,
            of which only the first columns count; `at` is the tile's first number in a layer's state; `operands` are
            all tokens' operands and the constants, each ``[tokens or rows, columns]``; `out` has all tokens' outputs;
            `rows` is three rows as wide as the tile. Each number must be computed in one order, whatever its tile
            and the other work are, so that its bits do not depend on them.
        piece: updates a tile by a unit, ``f(state, at, start, length, operands, out, scratch)``.
    """
    # The loops close over the functions that they call, so that LLVM inlines them: it could not by their addresses.
    decodes, units = _over_decodes(operands_of, token), _over_units(operands_of, token, piece)
    ffi.register(f"jpaged_{kernel}_decodes", decodes, items_of=((3, 0), (6, 0)))
    ffi.register(f"jpaged_{kernel}_units", units, items_of=((6, 0),))
    return f"jpaged_{kernel}_decodes", f"jpaged_{kernel}_units"


@njit
def _ints(frame, index):
    buffer = argument(frame, index)
    return carray(data(buffer), (dimension(buffer, 0),), np.int32)


@njit
def _matrix(buffer):
    """Return an array as its first axis and all others."""
    rows = dimension(buffer, 0)
    return carray(data(buffer), (rows, elements(buffer) // max(rows, 1)), np.float32)


@njit
def _operand(frame, number):
    return _matrix(argument(frame, _OPERANDS + number))


@njit
def four_operands(frame):
    """Return a kernel's own arguments as matrices; Numba cannot compile a tuple of variable length."""
    return _operand(frame, 0), _operand(frame, 1), _operand(frame, 2), _operand(frame, 3)


@njit
def five_operands(frame):
    """See `four_operands`."""
    return (*four_operands(frame), _operand(frame, 4))


@njit
def six_operands(frame):
    """See `four_operands`."""
    return (*five_operands(frame), _operand(frame, 5))


@njit
def _tile(frame, numbers, block, at):
    """Return a tile's rows in a block, ``[rows, stride]``; the tile is the first columns."""
    view = argument(frame, 0)
    page = block * dimension(view, 1) + numbers[0]
    place = ((page * dimension(view, 2) + numbers[1]) * LANES + at) * FLOAT
    return carray(pointer(address(view) + place), (numbers[4], numbers[5]), np.float32)


@njit
def _clear(out, first, tiles, tile):
    """Zero a tile's columns of the output from row `first` on."""
    width = out.shape[1] // tiles.size
    for row in range(first, len(out)):
        fill(out[row, tile * width : (tile + 1) * width], f32(0.0))


@njit
def _set(state, width, of):
    """Copy the first columns of a tile."""
    for row in range(len(state)):
        copy(of[row, :width], state[row])


@njit
def _zero(state, width):
    """Zero the first columns of a tile."""
    for row in range(len(state)):
        fill(state[row, :width], f32(0.0))


def _over_decodes(operands_of: Any, token: Any) -> Any:
    """Return the loop over the tiles of states that one token each updates, see `register`."""

    @ffi.cfunc(ffi.RUN, error_model="numpy")
    def decodes(frame, begin, end):
        operands = operands_of(frame)
        numbers, read, write, tiles = _ints(frame, 1), _ints(frame, 4), _ints(frame, 5), _ints(frame, 6)
        out, width = _matrix(result(frame, 1)), numbers[6]
        memory = allocate((3 * width + numbers[4] * numbers[5]) * FLOAT)
        rows, none = floats(memory, 3, width), floats(memory + 3 * width * FLOAT, numbers[4], numbers[5])
        for item in range(begin, end):
            unit, at = item // tiles.size, tiles[item % tiles.size]
            if numbers[8] and unit == read.size - 1:
                _clear(out, numbers[3], tiles, item % tiles.size)
            if unit < numbers[2] or unit >= numbers[3]:
                continue
            # Compute in the block that takes the state, or in `none` if none does; copy or zero it first if needed.
            state = _tile(frame, numbers, write[unit], at) if write[unit] >= 0 else none
            if read[unit] != write[unit] and read[unit] >= 0:
                _set(state, width, _tile(frame, numbers, read[unit], at))
            elif read[unit] < 0:
                _zero(state, width)
            token(state, at, unit, operands, out, rows)
        free(memory)

    return decodes


def _over_units(operands_of: Any, token: Any, piece: Any) -> Any:
    """Return the loop over tile positions, each of which walks over all units but decodes, see `register`."""

    @ffi.cfunc(ffi.RUN, error_model="numpy")
    def units(frame, begin, end):
        operands = operands_of(frame)
        numbers, start, length = _ints(frame, 1), _ints(frame, 2), _ints(frame, 3)
        read, write, tiles = _ints(frame, 4), _ints(frame, 5), _ints(frame, 6)
        out, width = _matrix(result(frame, 1)), numbers[6]
        of_scratch, of_rows = scratch_bytes(numbers[4], width), 3 * width * FLOAT
        memory = allocate(of_scratch + of_rows + numbers[4] * width * FLOAT)
        scratch, rows = scratch_at(memory, numbers[4], width), floats(memory + of_scratch, 3, width)
        state = floats(memory + of_scratch + of_rows, numbers[4], width)
        _zero(state, width)
        for item in range(begin, end):
            at = tiles[item]
            for unit in range(numbers[2], numbers[3]):
                # Otherwise the unit continues from the state that the last one left.
                if read[unit] >= 0:
                    _set(state, width, _tile(frame, numbers, read[unit], at))
                elif read[unit] == NEW:
                    _zero(state, width)
                if numbers[7]:
                    for number in range(start[unit], start[unit] + length[unit]):
                        token(state, at, number, operands, out, rows)
                else:
                    piece(state, at, start[unit], length[unit], operands, out, scratch)
                if write[unit] >= 0:
                    _set(_tile(frame, numbers, write[unit], at), width, state)
            last = numbers[3] - 1
            _clear(out, start[last] + length[last] if last >= 0 else 0, tiles, item)
        free(memory)

    return units
