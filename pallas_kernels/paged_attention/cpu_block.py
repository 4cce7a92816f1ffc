"""Attends to one block on CPU: scores of its keys, and its values weighted, by products of small tiles.

The rows of K and V are read where they lie, `ROW_BYTES` apart.
"""

from __future__ import annotations

from numba import njit

from pallas_kernels import cpu_tiles
from pallas_kernels.cpu_tiles import DOT_ROWS, FLOAT, LINE_BYTES, TABLE_ROWS, dots, tile
from pallas_kernels.ffi_primitives import prefetch
from pallas_kernels.layout import LANES

ROW_BYTES = LANES * FLOAT
"""Between the rows of two tokens in a tile."""

_VECTORS = 4
_COLUMNS = _VECTORS * cpu_tiles.LANES
"""Lanes of values that are summed at once."""

_several_dots, _single_dots = dots(DOT_ROWS, TABLE_ROWS), dots(1, TABLE_ROWS)
_two, _one = tile(2, _VECTORS), tile(1, _VECTORS)


@njit
def scores(queries, keys, coming, out, stride, group, block_size, parts, lanes, tiles):
    """Write the products of queries [group, parts * lanes] and a block's keys to out [group, block_size] of rows
    `stride` apart.

    Args:
        queries, keys, out: addresses; the block's rows are tiles one after the other.
        coming: address of the rows that will be read next, `tiles` of them, which are fetched meanwhile.
    """
    x_stride = parts * lanes * FLOAT
    for key in range(0, block_size, TABLE_ROWS):
        _fetch(coming, key, tiles)
        for part in range(parts):
            x, k = queries + part * lanes * FLOAT, keys + (part * block_size + key) * ROW_BYTES
            to, g = out + key * FLOAT, 0
            while group - g >= DOT_ROWS:
                _several_dots(x + g * x_stride, x_stride, k, ROW_BYTES, lanes, to + g * stride, stride, part)
                g += DOT_ROWS
            while g < group:
                _single_dots(x + g * x_stride, x_stride, k, ROW_BYTES, lanes, to + g * stride, stride, part)
                g += 1


@njit
def _fetch(rows, key, tiles):
    """Fetch `TABLE_ROWS` tokens' share of a block's rows."""
    begin = rows + key * tiles * ROW_BYTES
    for line in range(0, TABLE_ROWS * tiles * ROW_BYTES, LINE_BYTES):
        prefetch(begin + line)


@njit
def add_values(weights, x_stride, values, out, stride, group, keys, lanes):
    """Add to out [group, lanes] the product of weights [group, keys] and values [keys, lanes], all by address."""
    for column in range(0, lanes, _COLUMNS):
        x, v, to = weights, values + column * FLOAT, out + column * FLOAT
        for _ in range(group // 2):
            _two(x, x_stride, v, ROW_BYTES, keys, to, stride, 1, 0, 0)
            x, to = x + 2 * x_stride, to + 2 * stride
        if group % 2:
            _one(x, x_stride, v, ROW_BYTES, keys, to, stride, 1, 0, 0)
