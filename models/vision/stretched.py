"""Stretches a learned table of positions, which is a square grid, to the grid of a picture's patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Taps: TypeAlias = Sequence[tuple[Int[Array, " patches"], Float[Array, " patches"]]]
"""Places on one side of the table that a patch takes, and the share of each."""
_SHARPNESS = -0.75
"""The parameter of the cubic convolution (Keys, 1981), as torch has it."""


def centres(places: Int[Array, "patches 2"], sizes: Int[Array, "patches 2"], side: int) -> Float[Array, "patches 2"]:
    """Return where patches lie on a table of `side` entries a side, whose edges are those of a picture of so many rows
    and columns."""
    return (places + 0.5) / jnp.maximum(sizes, 1) * side - 0.5


def linear(at: Float[Array, " patches"], side: int) -> Taps:
    """Return the two nearest places; those beyond an edge are the edge's."""
    low = jnp.floor(at)
    share = at - low
    return _within([low, low + 1], [1 - share, share], side)


def cubic(at: Float[Array, " patches"], side: int) -> Taps:
    """Return the four nearest places, by cubic convolution."""
    low = jnp.floor(at)
    share, a = at - low, _SHARPNESS

    def near(x: Array) -> Array:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Array) -> Array:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    shares = [far(share + 1), near(share), near(1 - share), far(2 - share)]
    return _within([low - 1, low, low + 1, low + 2], shares, side)


def _within(places: Sequence[Array], shares: Sequence[Array], side: int) -> Taps:
    clipped = (jnp.clip(each, 0, side - 1).astype(jnp.int32) for each in places)
    return list(zip(clipped, shares, strict=True))


def side_of(entries: int) -> int:
    """Return the side of a table of so many entries."""
    return math.isqrt(entries)


def stretched(table: Float[Array, "entries embed"], rows: Taps, columns: Taps) -> Float[Array, "patches embed"]:
    """Return each patch's entry between those that it takes, in float32."""
    side, total = side_of(len(table)), jnp.zeros((), jnp.float32)
    for row, down in rows:
        for column, across in columns:
            taken = jnp.take(table, row * side + column, axis=0, mode="clip").astype(jnp.float32)
            total = total + taken * (down * across)[:, None]
    return total
