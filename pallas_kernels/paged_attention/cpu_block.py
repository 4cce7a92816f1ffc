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
from numba import types
from numba.extending import intrinsic, overload

from pallas_kernels import cpu_tiles
from pallas_kernels.cpu_tiles import FLOAT, LINE_BYTES, VECTOR, VectorCode, tile_by_rows
from pallas_kernels.ffi.loops import njit
from pallas_kernels.ffi.primitives import emit_prefetch
from pallas_kernels.paged_attention.cpu_rows import BFloat16, Float8, Float32, Int8, bfloat16, float8, int8
from pallas_kernels.paged_attention.cpu_scratch import HALF, SPAN, WORD

ROWS = 6
"""Most rows of a tile."""

_VECTORS = 4 if cpu_tiles.ROWS == 8 else 2
COLUMNS = _VECTORS * cpu_tiles.LANES
"""Columns of a tile, so many that the sums of `ROWS` rows and the operands fill the registers."""
_BYTES = cpu_tiles.LANES * FLOAT
_SPAN_BYTES = SPAN * FLOAT


def weighted(
    widen: Callable[[VectorCode, ir.Value], ir.Value] | None = None,
    bytes_held: int = FLOAT,
    fetch: int = 0,
    scaled: bool = False,
) -> Any:
    """Return a function that adds weighted values to 1 to `ROWS` rows: ``f(rows, weights, values, offset, keys, out,
    out_stride, shrink, scales, coming, further)``. Compiled loops call it.

    out [rows, COLUMNS] becomes ``out * shrink + weights @ values``. Weights [rows, SPAN], shrink [rows] and out are
    given by address. `values` is a list of addresses, one for each key, of which the first `keys` are used; a key's
    numbers lie `offset` bytes after its address. The numbers are float32, or have `bytes_held` bytes and are converted
    by `widen`; where `scaled`, they are multiplied by the keys' scales [keys]. For each key, `fetch` cache lines are
    prefetched, from `further` bytes after its address in the list `coming`.
    """

    @intrinsic
    def product(typingctx, rows, weights, values, offset, keys, out, out_stride, shrink, scales, coming, further):
        def generate(context, builder, signature, args):
            code = VectorCode(builder)
            code.by_number(
                args[0], ROWS, lambda rows: _emit_weighted(code, rows, widen, bytes_held, fetch, scaled, *args[1:])
            )
            return context.get_dummy_value()

        return types.void(*[types.intp] * 11), generate

    return product


def _emit_weighted(
    code: VectorCode,
    rows: int,
    widen: Callable[[VectorCode, ir.Value], ir.Value] | None,
    bytes_held: int,
    fetch: int,
    scaled: bool,
    *arguments: ir.Value,
) -> None:
    """Append the instructions of `weighted` for so many rows."""
    weights, values, offset, keys, out, out_stride, shrink, scales, coming, further = arguments
    builder = code.builder
    held = VECTOR if widen is None else ir.VectorType(ir.IntType(8 * bytes_held), cpu_tiles.LANES)
    x_rows = [code.at(weights, row * _SPAN_BYTES) for row in range(rows)]

    # One turn is one key: `_VECTORS` vectors of its value, each multiplied by the key's weight in every row.
    def turn(position: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
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
        added: list[ir.Value] = []
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


_scores, _weighted_values = tile_by_rows(ROWS, _VECTORS), weighted()


@njit
def scores(queries, depth, keys, out, number):
    """Write the products of queries [number, depth] and keys [depth, SPAN], by address, to out [number, SPAN]."""
    stride = depth * FLOAT
    # Rows outside, columns inside: the keys, [depth, SPAN], lie in the cache and are read again for each tile of rows.
    for row in range(0, number, ROWS):
        rows, x = min(number - row, ROWS), queries + row * stride
        for column in range(0, _SPAN_BYTES, COLUMNS * FLOAT):
            to = out + row * _SPAN_BYTES + column
            _scores(rows, x, stride, keys + column, _SPAN_BYTES, depth, to, _SPAN_BYTES)


@njit
def add_values(weights, values, offset, keys, out, width, shrink, number):
    """Update `HALF` lanes of out [number, width] to ``out * shrink + weights @ values``.

    weights [number, SPAN] and shrink [number] are given by address. A key's values lie `offset` bytes after its address
    in the list `values`; the first `keys` keys, at least one, are used.
    """
    stride = width * FLOAT
    for column in range(0, HALF * FLOAT, COLUMNS * FLOAT):
        for row in range(0, number, ROWS):
            rows, w, by = min(number - row, ROWS), weights + row * _SPAN_BYTES, shrink + row * FLOAT
            to = out + row * stride + column
            _weighted_values(rows, w, values, offset + column, keys, to, stride, by, 0, 0, 0)


MOST = ROWS
"""Most queries that `add_few_values` takes: the rows of one tile."""


def _product(widen: Callable[..., Any] | None, number_bytes: int, *, scaled: bool = False) -> Any:
    """Return the implementation of `add_few_values` for values of one form."""
    tiles = weighted(widen, number_bytes, HALF * number_bytes // LINE_BYTES, scaled)

    @njit
    def add(weights, held, keys, out, width, shrink, scales, number):
        (values, offset, coming, further), stride = held, width * FLOAT
        for column in range(0, HALF, COLUMNS):
            v, to = offset + column * number_bytes, out + column * FLOAT
            tiles(number, weights, values, v, keys, to, stride, shrink, scales, coming, further)

    return add


_ADD: dict[Any, Any] = {
    Float32: _product(None, 4),
    BFloat16: _product(bfloat16, 2),
    Int8: _product(int8, 1, scaled=True),
    Float8: _product(float8, 1),
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
