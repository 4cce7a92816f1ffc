"""Holds a table in 8 bits beside itself, with a bound of what that leaves out of each of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.tile_order import OUTPUTS

INPUTS = 4
"""Inputs of a tile."""
OFFSET = 128
"""What is added to every code, as the instructions take them without a sign."""
SCALE, LOST, LENGTH = range(3)
"""What `Screen.words` says of a row of the table."""
SMALLEST, LARGEST = 1e-10, 1e15
"""Between which the largest number of a row is, of the table or of x, for its bounds to hold: squares leave float32's
range beyond. Other rows of the table are always multiplied, and with other rows of x all of them are."""
_PANELS_AT_ONCE = 32
"""Panels that are made at once, so that what stands between fits a cache."""
_ROUNDED_UP = 1 + 1e-4
"""Makes a sum of squares in float32 no less than it is, of up to a thousand numbers that are each rounded."""


@partial(jax.tree_util.register_dataclass, data_fields=("codes", "words"), meta_fields=())
@dataclass(frozen=True)
class Screen:
    """Holds a table [outputs, inputs] in tiles of 16 outputs by 4 inputs; `make_screen` makes it.

    Attributes:
        codes: uint8 [panels, quads, 16, 4], each too large by `OFFSET`; codes beyond the table stand for 0.
        words: float32 [panels, 3, 16]: of each row of the table its scale; what, times the 2-norm of x, bounds both
            what rounding left out of a product and how far a float32 product is from the true one; and the 2-norm of
            what the codes stand for. Nobody knows a bound of rows that leave float32's range: it is infinite there, and
            -infinite behind the end of the table.
    """

    codes: Any
    words: Any


def abstract_screen(outputs: int, inputs: int) -> Screen:
    """Return what `make_screen` makes of a table of this shape, with shapes for arrays."""
    panels = -(-outputs // OUTPUTS)
    codes = jax.ShapeDtypeStruct((panels, -(-inputs // INPUTS), OUTPUTS, INPUTS), jnp.uint8)
    return Screen(codes, jax.ShapeDtypeStruct((panels, 3, OUTPUTS), jnp.float32))


@jax.jit
def make_screen(table: Float[Array, "outputs inputs"]) -> Screen:
    """Return the screen of a table of float32, whose inputs are whole tiles."""
    outputs, inputs = table.shape
    panels = -(-outputs // OUTPUTS)
    parts = -(-panels // _PANELS_AT_ONCE)
    # Parts have one shape; the last begins early enough to end with the table, and does some panels again.
    at_once = min(panels, _PANELS_AT_ONCE)
    whole = abstract_screen(outputs, inputs)
    padded = jnp.pad(table, ((0, panels * OUTPUTS - outputs), (0, 0))) if outputs % OUTPUTS else table

    def fill(number: Array, made: Screen) -> Screen:
        panel = jnp.minimum(number * at_once, panels - at_once)
        rows = jax.lax.dynamic_slice_in_dim(padded, panel * OUTPUTS, at_once * OUTPUTS)
        codes, words = _rounded(rows)
        there = panel * OUTPUTS + jnp.arange(len(rows)) < outputs
        words = words.at[LOST].set(jnp.where(there, words[LOST], -jnp.inf))
        tiles = codes.reshape(at_once, OUTPUTS, inputs // INPUTS, INPUTS).swapaxes(1, 2)
        of_panels = words.reshape(3, at_once, OUTPUTS).swapaxes(0, 1)
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=panel, axis=0)
        return Screen(put(made.codes, tiles), put(made.words, of_panels))

    empty = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), whole)
    return jax.lax.fori_loop(0, parts, fill, empty)


def _rounded(
    rows: Float[Array, "outputs inputs"],
) -> tuple[UInt8[Array, "outputs inputs"], Float[Array, "3 outputs"]]:
    """Return the codes of some rows, and what `Screen.words` says of them."""
    top = jnp.abs(rows).max(axis=1)
    fits = (top > SMALLEST) & (top < LARGEST)
    scale, inverse = jnp.where(fits, top / 127, 0.0), jnp.where(fits, 127 / top, 0.0)
    near = jnp.where(fits[:, None], jnp.clip(jnp.round(rows * inverse[:, None]), -127, 127), 0.0)
    held = near * scale[:, None]
    lost, length, own = (jnp.sqrt(jnp.square(part).sum(axis=1)) * _ROUNDED_UP for part in (rows - held, held, rows))
    # A float32 product of n numbers is within n units of rounding of the true one, in whatever order it is added up;
    # twice that, and more, also pays for rounding the bounds themselves.
    lost = lost + own * ((rows.shape[1] + 32) * 2.0**-23)
    lost = jnp.where(fits | (top == 0), lost, jnp.inf)
    return (near.astype(jnp.int32) + OFFSET).astype(jnp.uint8), jnp.stack([scale, lost, length])
