"""Attends to a span on CPU: computes the scores of its keys and the weighted sum of its values, in small tiles.

Memory. Queries [number, depth], keys [depth, SPAN], weights [number, SPAN] and sums of values [number, width] lie in a
thread's scratch (`cpu_scratch`), in the first- and second-level cache. Values are a list of addresses, one a key: in
scratch, as float32, or where they lie in the pool.

Loops. A tile has up to `ROWS` rows (queries) and `COLUMNS` columns, a few vectors. Its sums stay in registers while the
loop walks over the depth: the lanes of a key for scores, the keys of a span for values. With 16 vector registers 6 x 2
sums leave room for the operands; with 32, 6 x 4.

For few queries, as decodes have, `add_few_values` widens narrow numbers in registers and prefetches the next rows at
the same time. Where many queries share values, `cpu_rows` widens them once, into scratch. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from pallas_kernels import cpu_tiles, ffi
from pallas_kernels.cpu_tiles import FLOAT, LINE_BYTES, VECTOR, VectorCode, tile
from pallas_kernels.ffi.primitives import emit_prefetch
from pallas_kernels.paged_attention.cpu_math import HALF, SPAN, WORD
from pallas_kernels.paged_attention.cpu_rows import BFloat16, Float8, Float32, Int8, bfloat16, float8, int8

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


MOST = ROWS
"""Most queries that `add_few_values` takes: the rows of one tile."""


def _product(name: str, widen: Callable[..., Any] | None, number_bytes: int, *, scaled: bool = False) -> Any:
    """Return the implementation of `add_few_values` for values of one form."""
    lines = HALF * number_bytes // LINE_BYTES
    tiles = (weighted(rows, widen, number_bytes, lines, scaled) for rows in range(ROWS, 0, -1))
    six, five, four, three, two, one = tiles

    # One compiled tile for each number of rows: a tile keeps its sums in registers, so its size is fixed. Numba cannot
    # index a tuple of functions by a variable, hence the chain of branches.
    @ffi.njit_named(name)
    def add(weights, held, keys, out, width, shrink, scales, number):
        (values, offset, coming, further), stride = held, width * FLOAT
        for column in range(0, HALF, COLUMNS):
            v, to = offset + column * number_bytes, out + column * FLOAT
            if number == 6:
                six(weights, values, v, keys, to, stride, shrink, scales, coming, further)
            elif number == 5:
                five(weights, values, v, keys, to, stride, shrink, scales, coming, further)
            elif number == 4:
                four(weights, values, v, keys, to, stride, shrink, scales, coming, further)
            elif number == 3:
                three(weights, values, v, keys, to, stride, shrink, scales, coming, further)
            elif number == 2:
                two(weights, values, v, keys, to, stride, shrink, scales, coming, further)
            else:
                one(weights, values, v, keys, to, stride, shrink, scales, coming, further)

    return add


_ADD: dict[Any, Any] = {
    Float32: _product("float32", None, 4),
    BFloat16: _product("bfloat16", bfloat16, 2),
    Int8: _product("int8", int8, 1, scaled=True),
    Float8: _product("float8", float8, 1),
}


def takes_few(numbers):
    """Tell whether `add_few_values` takes values of this form."""


def add_few_values(numbers, weights, held, keys, out, width, shrink, scales, number):
    """Do the same as `cpu_block.add_values` for up to `MOST` queries, with values in the view's own dtype.

    `scales` has one float32 a key, for dtypes that have scales. `held` is four things: the addresses of the rows of
    values, the offset in bytes from there to the lanes to add, the addresses of the rows that come next, and the offset
    at which to prefetch those.
    """


@overload(takes_few)
def _takes_few(numbers):
    takes = _form(numbers) in _ADD
    return lambda numbers: takes


@overload(add_few_values)
def _add_few_values(numbers, weights, held, keys, out, width, shrink, scales, number):
    if (add := _ADD.get(_form(numbers))) is None:
        return lambda numbers, weights, held, keys, out, width, shrink, scales, number: None
    return lambda numbers, weights, held, keys, out, width, shrink, scales, number: add(
        weights, held, keys, out, width, shrink, scales, number
    )


def _form(numbers: types.Type) -> type | None:
    return getattr(numbers, "instance_class", None)
