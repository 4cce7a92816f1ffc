"""Holds the loops of `pallas_kernels.kv_write.cpu`: a few tokens are an item of work."""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
from numba import carray, njit

from pallas_kernels import ffi
from pallas_kernels.ffi import address, argument, data, dimension
from pallas_kernels.ffi.primitives import pointer
from pallas_kernels.layout import LANES

TOKENS = 8
"""Tokens of an item: fewer are not worth a second thread."""
_WORD = 8

_HALF = LANES // 2

_words: Any = None
"""Stands for what `_compiled` puts in its place: words of 8 bytes in a row of lanes."""
_hold: Any = None
_item_bytes: Any = None
"""Stand for what `_kv_loop` puts in their places: how numbers are held, and in how many bytes."""


@ffi.known_again
def target(item_bytes: int) -> str:
    """Return the name of the custom call (view, rows, layer ``[1]``, slots) -> view, which is the argument; numbers
    have `item_bytes` bytes."""
    name = f"jpaged_kv_write_{item_bytes}"
    ffi.register(name, _compiled(item_bytes), items_of=((3, 0),), portion=TOKENS, grains=4)
    return name


@ffi.known_again
def kv_target(dtype: str) -> str:
    """Return the name of the custom call (view, k, v ``[tokens, kv_heads, head_dim]``, layer ``[1]``, slots) -> view,
    which is the argument; `dtype` is one of `_HELD`."""
    name = f"jpaged_kv_write_kv_{dtype}"
    ffi.register(name, _kv_loop(dtype), items_of=((4, 0),), portion=TOKENS, grains=4)
    return name


@cache
def _compiled(item_bytes: int) -> Any:
    names = _write.__globals__ | {"_words": LANES * item_bytes // _WORD}
    return ffi.cfunc(ffi.RUN, error_model="numpy")(
        ffi.named(FunctionType(_write.__code__, names, "kv_write"), str(item_bytes))
    )


def _write(frame, begin, end):
    view, rows = argument(frame, 0), argument(frame, 1)
    blocks, layers, heads = dimension(view, 0), dimension(view, 1), dimension(view, 2) * dimension(view, 3)
    block_size, row_bytes = dimension(view, 4), _words * _WORD
    layer = carray(data(argument(frame, 2)), (1,), np.int32)[0]
    tokens = dimension(argument(frame, 3), 0)
    slots = carray(data(argument(frame, 3)), (tokens,), np.int32)
    base = address(ffi.result(frame, 0))
    for token in range(begin * TOKENS, min(end * TOKENS, tokens)):
        slot = np.int64(slots[token])
        if not 0 <= slot < blocks * block_size:
            continue
        block, offset = slot // block_size, slot % block_size
        for head in range(heads):
            place = ((block * layers + layer) * heads + head) * block_size + offset
            theirs = carray(pointer(base + place * row_bytes), (_words,), np.int64)
            ours = carray(pointer(address(rows) + (token * heads + head) * row_bytes), (_words,), np.int64)
            for word in range(_words):
                theirs[word] = ours[word]


@njit
def _hold_floats(source, number, to):
    """Copy some float32 numbers, and put zeros behind them up to `_HALF` lanes."""
    ours, theirs = carray(pointer(source), (number,), np.float32), carray(pointer(to), (_HALF,), np.float32)
    for lane in range(number):
        theirs[lane] = ours[lane]
    theirs[number:] = np.float32(0.0)


@njit
def _hold_upper_halves(source, number, to):
    """Do the same with numbers rounded to bfloat16, of two the even one."""
    ours, theirs = carray(pointer(source), (number,), np.uint32), carray(pointer(to), (_HALF,), np.uint16)
    for lane in range(number):
        bits = ours[lane]
        upper = bits >> np.uint32(16)
        near = (bits + (upper & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)
        is_number = (bits & np.uint32(0x7FFFFFFF)) <= np.uint32(0x7F800000)
        theirs[lane] = np.uint16(near if is_number else upper | np.uint32(0x40))
    theirs[number:] = np.uint16(0)


_HELD = {
    "float32": (_hold_floats, 4),
    "bfloat16": (_hold_upper_halves, 2),
    "uint16": (_hold_upper_halves, 2),
}
"""What holds a view's numbers, and their bytes."""


@cache
def _kv_loop(dtype: str) -> Any:
    hold, item_bytes = _HELD[dtype]
    names = _write_kv.__globals__ | {"_hold": hold, "_item_bytes": item_bytes}
    return ffi.cfunc(ffi.RUN, error_model="numpy")(
        ffi.named(FunctionType(_write_kv.__code__, names, "write_kv"), dtype)
    )


def _write_kv(frame, begin, end):
    view, k, v = argument(frame, 0), argument(frame, 1), argument(frame, 2)
    blocks, layers, heads, tiles = dimension(view, 0), dimension(view, 1), dimension(view, 2), dimension(view, 3)
    block_size, row_bytes, width = dimension(view, 4), LANES * _item_bytes, dimension(k, 2)
    layer = carray(data(argument(frame, 3)), (1,), np.int32)[0]
    tokens = dimension(argument(frame, 4), 0)
    slots = carray(data(argument(frame, 4)), (tokens,), np.int32)
    base = address(ffi.result(frame, 0))
    for token in range(begin * TOKENS, min(end * TOKENS, tokens)):
        slot = np.int64(slots[token])
        if not 0 <= slot < blocks * block_size:
            continue
        block, offset = slot // block_size, slot % block_size
        for head in range(heads):
            first = ((block * layers + layer) * heads + head) * tiles * block_size + offset
            source = (token * heads + head) * width * 4
            for half in range(2 * tiles):  # as many of K as of V
                numbers, lane = (address(k), half * _HALF) if half < tiles else (address(v), (half - tiles) * _HALF)
                to = base + (first + half // 2 * block_size) * row_bytes + half % 2 * (row_bytes // 2)
                _hold(numbers + source + lane * 4, max(0, min(_HALF, width - lane)), to)
