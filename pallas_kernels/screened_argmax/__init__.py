"""Finds the place of the largest product of each row with a table's rows, without all the products.

A `Screen` holds a table in 8 bits, with what rounding took from each row. It gives every product to within a bound that
is proved (Cauchy and Schwarz), so that only rows of the table whose upper bound reaches the best lower bound have to be
multiplied in float32. The place is that of the largest of all float32 products, ties included, always; of a vocabulary
a few dozen words are multiplied, and a quarter of the table's bytes is read. Where too many might be the largest, all
are multiplied.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.platform import Impl
from pallas_kernels.screened_argmax import cpu, reference
from pallas_kernels.screened_argmax.screen import Screen, abstract_screen, make_screen

__all__ = ["Screen", "abstract_screen", "make_screen", "screened_argmax", "screens"]


def screens(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, impl: Impl) -> bool:
    """Tell whether a table of this shape and dtype is worth a screen: on CPUs with VNNI that hold it whole in float32,
    in rows of whole vectors."""
    return impl == "cpu" and cpu.takes(shape, dtype)


def screened_argmax(
    x: Float[Array, "rows inputs"],
    table: Float[Array, "outputs inputs"],
    screen: Screen,
    *,
    rows: Int[Array, ""] | None = None,
    impl: Impl = "xla",
) -> Int[Array, " rows"]:
    """Return the first place of each row's largest number in ``x @ table.T``, of float32 operands.

    Args:
        screen: what `make_screen` returns for this table.
        rows: how many rows of x, the first ones, are wanted; the others give any place. None: all.
        impl: ``cpu`` adds products up as `pallas_kernels.matmul.cpu.matmul_table` does, whatever the number of rows,
            and needs unsharded operands that `screens` accepts. All others are XLA's, which need no screen.
    """
    if impl == "cpu":
        return cpu.screened_argmax(x, table, screen, rows)
    return reference.screened_argmax(x, table)
