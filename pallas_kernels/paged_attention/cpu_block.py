"""Attends to a span on CPU: computes the scores of its keys and the weighted sum of its values, in small tiles.

A tile has up to `ROWS` rows (queries) and `COLUMNS` columns, a few vectors. Its sums stay in registers while the loop
walks over the depth: the lanes of a key for scores, the keys of a span for values. With 16 vector registers 6 x 2 sums
leave room for the operands; with 32, 6 x 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from pallas_kernels import cpu_tiles
from pallas_kernels.cpu_tiles import FLOAT, VECTOR, VectorCode, tile
from pallas_kernels.ffi.primitives import emit_prefetch
from pallas_kernels.paged_attention.cpu_math import HALF, SPAN, WORD

ROWS = 6
"""Most rows of a tile."""

_VECTORS = 4 if cpu_tiles.ROWS == 8 else 2
COLUMNS = _VECTORS * cpu_tiles.LANES
"""Columns of a tile, so many that the sums of `ROWS` rows and the operands fill the registers."""
_BYTES = cpu_tiles.LANES * FLOAT
_SPAN_BYTES = SPAN * FLOAT


def weighted(
    rows: int,
    widen: Callable[[VectorCode, ir.Value], ir.Value] | None = None,
    bytes_held: int = FLOAT,
    fetch: int = 0,
    scaled: bool = False,
) -> Any:
    """Return ``f(weights, values, offset, keys, out, out_stride, shrink, scales, coming, further)``, to be called from
    compiled loops.

    out [rows, COLUMNS] becomes ``out * shrink + weights @ values``; weights [rows, SPAN], shrink [rows], all by
    address. `values` is a list of addresses, one a key; the key's numbers lie `offset` bytes further. The first `keys`
    of them are used. The numbers are float32, or have `bytes_held` bytes and are converted by `widen`; where `scaled`,
    they are multiplied by the keys' scales [keys]. For each key, `fetch` cache lines are prefetched, from `further`
    bytes after its address in the list `coming`.
    """
    held = VECTOR if widen is None else ir.VectorType(ir.IntType(8 * bytes_held), cpu_tiles.LANES)

    @intrinsic
    def product(typingctx, weights, values, offset, keys, out, out_stride, shrink, scales, coming, further):
        def generate(context, builder, signature, args):
            weights, values, offset, keys, out, out_stride, shrink, scales, coming, further = args
            code = VectorCode(builder)
            x_rows = [code.at(weights, row * _SPAN_BYTES) for row in range(rows)]

            # One turn is one key: `_VECTORS` vectors of its value, each multiplied by the key's weight in every row.
            def turn(position, sums):
                word = builder.mul(position, ir.Constant(ir.IntType(64), WORD))
                row = code.at(code.load(code.at(values, word), ir.IntType(64)), offset)
                if fetch:
                    theirs = code.at(code.load(code.at(coming, word), ir.IntType(64)), further)
                    for line in range(fetch):
                        emit_prefetch(builder, code.at(theirs, line * cpu_tiles.LINE_BYTES))
                places = [code.at(row, n * cpu_tiles.LANES * bytes_held) for n in range(_VECTORS)]
                columns = [code.load(place, held, bytes_held) for place in places]
                columns = columns if widen is None else [widen(code, column) for column in columns]
                at = builder.mul(position, ir.Constant(ir.IntType(64), FLOAT))
                if scaled:
                    scale = code.spread(code.load(code.at(scales, at), ir.FloatType()))
                    columns = [builder.fmul(column, scale) for column in columns]
                added = []
                for m, x_row in enumerate(x_rows):
                    number = code.spread(code.load(code.at(x_row, at), ir.FloatType()))
                    added += [code.fma(number, vector, sums[_VECTORS * m + n]) for n, vector in enumerate(columns)]
                return added

            # The sums begin at 0 in registers, so the old values in memory are read and scaled only once a span.
            sums = code.sums(keys, rows * _VECTORS, turn)
            for m, to in enumerate(code.rows(out, out_stride, rows)):
                factor = code.spread(code.load(code.at(shrink, m * FLOAT), ir.FloatType()))
                for n in range(_VECTORS):
                    at = code.at(to, n * _BYTES)
                    code.store(code.fma(code.load(at), factor, sums[_VECTORS * m + n]), at)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 10), generate

    return product


_six, _five, _four, _three, _two, _one = (tile(rows, _VECTORS) for rows in range(ROWS, 0, -1))
_six_values, _five_values, _four_values, _three_values, _two_values, _one_value = map(weighted, range(ROWS, 0, -1))


@njit
def scores(queries, depth, keys, out, number):
    """Write the products of queries [number, depth] and keys [depth, SPAN], by address, to out [number, SPAN]."""
    stride = depth * FLOAT
    # Rows outside, columns inside: the keys, [depth, SPAN], lie in the cache and are read again for each tile of rows.
    # The tile functions have fixed numbers of rows, hence the branches.
    for row in range(0, number, ROWS):
        left, x = number - row, queries + row * stride
        for column in range(0, _SPAN_BYTES, COLUMNS * FLOAT):
            k, to = keys + column, out + row * _SPAN_BYTES + column
            if left >= 6:
                _six(x, stride, k, _SPAN_BYTES, depth, to, _SPAN_BYTES, 0, 0, 0)
            elif left == 5:
                _five(x, stride, k, _SPAN_BYTES, depth, to, _SPAN_BYTES, 0, 0, 0)
            elif left == 4:
                _four(x, stride, k, _SPAN_BYTES, depth, to, _SPAN_BYTES, 0, 0, 0)
            elif left == 3:
                _three(x, stride, k, _SPAN_BYTES, depth, to, _SPAN_BYTES, 0, 0, 0)
            elif left == 2:
                _two(x, stride, k, _SPAN_BYTES, depth, to, _SPAN_BYTES, 0, 0, 0)
            else:
                _one(x, stride, k, _SPAN_BYTES, depth, to, _SPAN_BYTES, 0, 0, 0)


@njit
def add_values(weights, values, offset, keys, out, width, shrink, number):
    """Update `HALF` lanes of out [number, width] to ``out * shrink + weights @ values``.

    weights [number, SPAN] and shrink [number] are given by address. A key's values lie `offset` bytes after its address
    in the list `values`; the first `keys` keys, at least one, are used.
    """
    stride = width * FLOAT
    for column in range(0, HALF * FLOAT, COLUMNS * FLOAT):
        v = offset + column
        for row in range(0, number, ROWS):
            left, w, to, by = (
                number - row,
                weights + row * _SPAN_BYTES,
                out + row * stride + column,
                shrink + row * FLOAT,
            )
            if left >= 6:
                _six_values(w, values, v, keys, to, stride, by, 0, 0, 0)
            elif left == 5:
                _five_values(w, values, v, keys, to, stride, by, 0, 0, 0)
            elif left == 4:
                _four_values(w, values, v, keys, to, stride, by, 0, 0, 0)
            elif left == 3:
                _three_values(w, values, v, keys, to, stride, by, 0, 0, 0)
            elif left == 2:
                _two_values(w, values, v, keys, to, stride, by, 0, 0, 0)
            else:
                _one_value(w, values, v, keys, to, stride, by, 0, 0, 0)
