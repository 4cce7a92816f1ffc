"""Holds an 8-bit copy of a table, with a bound on the rounding error of each row."""

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
"""Offset added to every code, as the instructions take unsigned codes."""
SCALE, LOST, LENGTH = range(3)
"""Indices of a row's numbers in `Screen.words`."""
GROUP = 8
"""Rows of x that go through the tiles together."""
MOST_DIGITS = 8
"""Digits of a number of x."""
SMALLEST, LARGEST = 1e-10, 1e15
"""Range of a row's largest number, in the table or in x, in which its bounds hold; beyond it squares leave float32's
range. Other rows of the table are always multiplied, and other rows of x are multiplied with the whole table."""
_PANELS_AT_ONCE = 32
"""Panels that are made at once, so that intermediate arrays fit in the cache."""
_ROUNDED_UP = 1 + 1e-4
"""Factor that makes a sum of squares in float32 an upper bound, for up to a thousand numbers that are each rounded."""


@partial(jax.tree_util.register_dataclass, data_fields=("codes", "words"), meta_fields=())
@dataclass(frozen=True)
class Screen:
    """Holds a table [outputs, inputs] in tiles of 16 outputs by 4 inputs; `make_screen` makes it.

    Attributes:
        codes: uint8 [panels, quads, 16, 4], each too large by `OFFSET`; codes beyond the table stand for 0.
        words: float32 [panels, 3, 16], three numbers for each row of the table: its scale; a factor that, times the
            2-norm of x, bounds the product's error, both from rounding to codes and from float32 arithmetic; and the
            2-norm of the decoded row. Rows that leave float32's range have no such bound: the factor is infinite
            there, and -infinite after the end of the table.
    """

    codes: Any
    words: Any


def most_turns(inputs: int) -> int:
    """Return how many turns a group of rows of x can have, each a tile's inputs and one digit."""
    return MOST_DIGITS * (inputs // INPUTS)


def abstract_screen(outputs: int, inputs: int) -> Screen:
    """Return the result of `make_screen` for a table of this shape, with shapes in place of arrays."""
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
    """Return the codes of some rows, and their `Screen.words`."""
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
