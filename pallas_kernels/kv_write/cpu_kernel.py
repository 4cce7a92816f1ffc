"""Holds the loop of `pallas_kernels.kv_write.cpu`, compiled by Numba.

Memory. The view, [blocks, layers, heads and tiles, block_size, 128], is donated and written where it lies. A row is 256
bytes, four cache lines. Loops. A token is an item of work, which XLA's threads share; inside, its rows of all heads and
tiles, which lie ``block_size`` rows apart in the view. Slots are distinct, so threads do not meet.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from pallas_kernels import ffi
from pallas_kernels.ffi import address, argument, data, dimension
from pallas_kernels.ffi.primitives import pointer
from pallas_kernels.layout import LANES

_BYTES = 2


@ffi.known_again
def target() -> str:
    """Return the name of the custom call (view, rows, layer ``[1]``, slots) -> view, which is the argument; numbers
    have two bytes."""
    name = "jpaged_kv_write"
    ffi.register(name, _write, items_of=((3, 0),))
    return name


@ffi.cfunc(ffi.RUN, error_model="numpy")
def _write(frame, begin, end):
    view, rows = argument(frame, 0), argument(frame, 1)
    blocks, layers, heads = dimension(view, 0), dimension(view, 1), dimension(view, 2) * dimension(view, 3)
    block_size, row_bytes = dimension(view, 4), LANES * _BYTES
    layer = carray(data(argument(frame, 2)), (1,), np.int32)[0]
    slots = carray(data(argument(frame, 3)), (dimension(argument(frame, 3), 0),), np.int32)
    base = address(ffi.result(frame, 0))
    for token in range(begin, end):
        slot = np.int64(slots[token])
        if not 0 <= slot < blocks * block_size:
            continue
        block, offset = slot // block_size, slot % block_size
        for head in range(heads):
            place = ((block * layers + layer) * heads + head) * block_size + offset
            theirs = carray(pointer(base + place * row_bytes), (LANES,), np.int16)
            ours = carray(pointer(address(rows) + (token * heads + head) * row_bytes), (LANES,), np.int16)
            for lane in range(LANES):
                theirs[lane] = ours[lane]
