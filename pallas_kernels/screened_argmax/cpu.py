"""Implements screened_argmax on CPUs with VNNI, by loops that Numba compiles and XLA calls on its own threads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cpu_features import LANES, kinds_here
from pallas_kernels.custom_calls import target
from pallas_kernels.matmul import cpu as products
from pallas_kernels.row_ops import largest
from pallas_kernels.screened_argmax.screen import GROUP, INPUTS, Screen, most_turns

MOST_LISTED = 4096
"""Rows of the table that may be listed for a row of x; with more, all are multiplied."""
FACTS = 4
"""Numbers stored for each row of x besides its digits: the correction for the codes' offset; its norm and the norm of
its rounding error, both in units of its scale; and the best lower bound so far, in the same units."""


def takes(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> bool:
    """Tell whether a table of this shape and dtype is screened here: float32, rows in whole vectors; and that
    this machine has the instructions."""
    fits = shape[1] % max(LANES, INPUTS) == 0 and jnp.dtype(dtype) == jnp.float32
    return fits and any(kind in ("vnni512", "vnni256") for kind in kinds_here())


def screened_argmax(
    x: Float[Array, "rows inputs"],
    table: Float[Array, "outputs inputs"],
    screen: Screen,
    rows: Int[Array, ""] | None = None,
    *,
    most_listed: int = MOST_LISTED,
) -> Int[Array, " rows"]:
    """See `pallas_kernels.screened_argmax.screened_argmax`."""
    places, complete = screened(x, table, screen, rows, most_listed=most_listed)[:2]
    return jax.lax.cond(
        complete.all(), lambda: places, lambda: largest(products.matmul_table(x, table, rows), impl="cpu")[0]
    )


def screened(
    x: Float[Array, "rows inputs"],
    table: Float[Array, "outputs inputs"],
    screen: Screen,
    rows: Int[Array, ""] | None = None,
    *,
    most_listed: int = MOST_LISTED,
) -> tuple[Int[Array, " rows"], Int[Array, " rows"], Int[Array, " rows"]]:
    """Return the places, whether each was found, and how many rows of the table were multiplied for it.

    A place is not found for a row of x with too many rows of the table listed, of zeros, or with what is not finite,
    and where a product that was computed is not a number.
    """
    number, inputs = x.shape
    groups, turns = -(-number // GROUP), most_turns(inputs)
    like = jax.ShapeDtypeStruct
    results = (
        like((groups, turns, GROUP * INPUTS), jnp.int8),
        like((groups, turns + 1), jnp.int32),
        like((groups * GROUP, FACTS), jnp.float32),
        like((number, most_listed, 2), jnp.int32),
        like((number, 2), jnp.int32),
    )
    wanted = jnp.asarray([number if rows is None else rows, len(table)], jnp.int32)
    call = jax.ffi.ffi_call(target("screened_argmax.cpu_kernel:screen_target"), results)
    _, _, facts, listed, counts = call(x, wanted, screen.codes, screen.words)
    shape = like((number,), jnp.int32)
    call = jax.ffi.ffi_call(target("screened_argmax.cpu_kernel:exact_target"), (shape, shape, shape))
    places, complete, tried = call(x, wanted, table, facts, listed, counts)
    return places, complete, tried
