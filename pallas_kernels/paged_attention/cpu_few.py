"""Adds up weighted values for few queries, as decodes have: narrow numbers are widened in registers, and what follows
comes from memory meanwhile.

Where many queries share values, they are widened once, to where all find them (`cpu_rows`). Both give the same bits.
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
"""Queries that are few."""


def _product(name: str, widen: Callable[..., Any] | None, number_bytes: int, *, scaled: bool = False) -> Any:
    """Return what `add_few_values` does with values of one form."""
    lines = HALF * number_bytes // LINE_BYTES
    tiles = (weighted(rows, widen, number_bytes, lines, scaled) for rows in range(ROWS, 0, -1))
    six, five, four, three, two, one = tiles

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
    """Do as `cpu_block.add_values` with values as they are held, for up to `MOST` queries.

    `scales` are the keys', of numbers that have some. `held` are the addresses of rows of values and the bytes from
    there to the lanes that are taken; then those of rows that come next, as many of which are fetched meanwhile, and
    the bytes from there.
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
