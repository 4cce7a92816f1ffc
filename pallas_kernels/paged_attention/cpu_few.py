"""Adds up weighted values for few queries, as decodes have: widens narrow numbers in registers, and prefetches the next
rows at the same time.

Where many queries share values, `cpu_rows` widens them once, into scratch memory. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import overload

from pallas_kernels import ffi
from pallas_kernels.cpu_tiles import FLOAT, LINE_BYTES
from pallas_kernels.paged_attention.cpu_block import COLUMNS, ROWS, weighted
from pallas_kernels.paged_attention.cpu_math import HALF
from pallas_kernels.paged_attention.cpu_rows import BFloat16, Float8, Float32, Int8, bfloat16, float8, int8

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
