"""Defines the layout of a recurrent layer's state in the pool, and of a ragged batch as units of one sequence each.

A view is ``[blocks, layers, rows, 128]`` in the pool's dtype. One layer's state in a block has several parts (the last
inputs of a convolution, the state of a scan), each beginning at a new row. A part's elements are bitcast to the pool's
dtype. If they are wider, several consecutive rows of the pool hold one row of 128 elements, low bits first; if they are
narrower, one row of the pool holds several. So a block can be moved, copied and swapped like any other, without a
change of its bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Shaped

LANES = 128

UNIT = 64
"""Most tokens of a unit. Units end where a sequence's positions are multiples of it, so that the cut of a sequence does
not depend on the rest of the batch."""

ROW_TILE = 8
"""A part fills whole tiles of so many rows of four bytes per lane, the layout of TPUs."""

NEW = -1
"""`Units.read` of a sequence's first tokens: the state before them is zero."""

CARRY = -2
"""`Units.read` of a unit that follows the one before it in its sequence."""


@dataclass(frozen=True)
class StatePlace:
    """The place of one part of a layer's state on one device.

    Attributes:
        row: first row of the view.
        shape: shape of the part of one sequence, on one device.
        dtype: dtype of its elements.
    """

    row: int
    shape: tuple[int, ...]
    dtype: jnp.dtype

    def rows(self, pool_dtype: DTypeLike) -> int:
        """Return the number of rows of the view that the part takes."""
        itemsize = jnp.dtype(pool_dtype).itemsize
        whole = ROW_TILE * 4 * LANES
        return -(-prod(self.shape) * self.dtype.itemsize // whole) * whole // (LANES * itemsize)

    def lying(self, *shape: int) -> StatePlace:
        """Return the place with the shape in memory order, in which the axis that kernels sum over comes before the
        axis along lanes. `shape` has the same number of elements."""
        return replace(self, shape=shape)


@dataclass(frozen=True)
class Units:
    """A step's tokens, cut into units: runs of at most `most` tokens of one sequence.

    The first `num_decodes` units have one token each (unit ``i`` has token ``i``) and belong to distinct sequences;
    they read a block or nothing. The units of a sequence follow one another, and all but the first read `CARRY`.

    Only units of the same sequence may read a block that a unit writes.

    Attributes:
        start, length: a unit's tokens are ``[start, start + length)``; each unit starts where the one before it ends.
        read: block that holds the state before them, or `NEW` or `CARRY`.
        write: block that takes the state after them; -1 = none. No two units write the same block.
        num_decodes, num_units: number of decodes and of all units; the arrays' other entries are padding.
        most: most tokens of a unit, `UNIT` or 1.
        decodes_only: whether all units are decodes, known when the step is compiled.
    """

    start: Int[Array, " units"]
    length: Int[Array, " units"]
    read: Int[Array, " units"]
    write: Int[Array, " units"]
    num_decodes: Int[Array, ""]
    num_units: Int[Array, ""]
    most: int = UNIT
    decodes_only: bool = False


def read_states(
    view: Shaped[Array, "blocks layers rows 128"],
    layer: int | Int[Array, ""] | Int[Array, " ids"],
    place: StatePlace,
    ids: Int[Array, " ids"],
) -> Shaped[Array, "ids ..."]:
    """Return the states that blocks `ids` hold; zeros where an id is negative. Each may be of a layer of its own."""
    rows = place.rows(view.dtype)
    pages, page = _pages(view, layer, jnp.maximum(ids, 0))
    if len(ids) == 1:
        # A loop of one turn or none. XLA may repeat a read outside of a loop at its use, after the pool was written,
        # and would keep a copy of the pool for it.
        raw, start = jnp.zeros((1, rows, LANES), view.dtype), (page[0], place.row, 0)
        count = (ids[0] >= 0).astype(jnp.int32)
        raw = lax.fori_loop(0, count, lambda _, __: lax.dynamic_slice(pages, start, raw.shape), raw)
        return _states(raw, place)
    at = jnp.stack([page, jnp.full_like(ids, place.row)], axis=1)
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    raw = lax.gather(pages, at, numbers, (1, rows, LANES), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    states = _states(raw, place)
    return jnp.where((ids >= 0).reshape(-1, *(1,) * len(place.shape)), states, jnp.zeros((), states.dtype))


def _states(raw: Shaped[Array, "ids rows 128"], place: StatePlace) -> Shaped[Array, "ids ..."]:
    return from_rows(raw, place.dtype).reshape(len(raw), -1)[:, : prod(place.shape)].reshape(-1, *place.shape)


def write_states(
    view: Shaped[Array, "blocks layers rows 128"],
    layer: int | Int[Array, ""] | Int[Array, " ids"],
    place: StatePlace,
    ids: Int[Array, " ids"],
    states: Shaped[Array, "ids ..."],
) -> Shaped[Array, "blocks layers rows 128"]:
    """Return the view with `states` in blocks `ids`; a negative id drops its state. Each may be of a layer of its
    own."""
    rows = place.rows(view.dtype)
    flat = states.astype(place.dtype).reshape(len(ids), -1)
    wide = rows * LANES * view.dtype.itemsize // place.dtype.itemsize
    raw = to_rows(jnp.pad(flat, ((0, 0), (0, wide - flat.shape[1]))).reshape(len(ids), -1, LANES), view.dtype)
    pages, page = _pages(view, layer, ids)
    if len(ids) == 1:
        # A loop of one turn or none, with a count unknown to XLA, which would copy the pool for a select or a scatter.
        count, start = (ids[0] >= 0).astype(jnp.int32), (page[0], place.row, 0)
        written = lax.fori_loop(0, count, lambda _, pool: lax.dynamic_update_slice(pool, raw, start), pages)
        return written.reshape(view.shape)
    at = jnp.stack([jnp.where(ids < 0, len(pages), page), jnp.full_like(ids, place.row)], axis=1)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(pages, at, raw, numbers, unique_indices=True, mode=mode).reshape(view.shape)


def _pages(
    view: Shaped[Array, "blocks layers rows 128"],
    layer: int | Int[Array, ""] | Int[Array, " ids"],
    ids: Int[Array, " ids"],
) -> tuple[Shaped[Array, "pages rows 128"], Int[Array, " ids"]]:
    """Return the view with one page per block and layer, and the pages of a layer in some blocks.

    With a separate axis of layers, XLA may choose an order of axes for which it copies the pool.
    """
    layers = view.shape[1]
    return view.reshape(-1, *view.shape[2:]), ids * layers + jnp.asarray(layer, jnp.int32)


def from_rows(raw: Shaped[Array, "ids rows 128"], dtype: DTypeLike) -> Shaped[Array, "ids wide 128"]:
    """Return rows of the pool as rows of `dtype`, the inverse of `to_rows`."""
    raw = lax.bitcast_convert_type(raw, _bits(raw.dtype))  # moves of floats may change bits
    ratio = jnp.dtype(dtype).itemsize / raw.dtype.itemsize
    if ratio > 1:  # [ids, wide, ratio, 128] -> the pieces of an element last
        raw = jnp.moveaxis(raw.reshape(len(raw), -1, int(ratio), LANES), 2, 3)
    states = lax.bitcast_convert_type(raw, dtype)
    return jnp.moveaxis(states, 3, 2).reshape(len(raw), -1, LANES) if ratio < 1 else states


def to_rows(states: Shaped[Array, "ids wide 128"], dtype: DTypeLike) -> Shaped[Array, "ids rows 128"]:
    """Return rows of states as rows of the pool's `dtype`; see the module."""
    ratio = states.dtype.itemsize / jnp.dtype(dtype).itemsize
    if ratio < 1:
        states = jnp.moveaxis(states.reshape(len(states), -1, round(1 / ratio), LANES), 2, 3)
    raw = lax.bitcast_convert_type(states, _bits(dtype))
    if ratio > 1:
        raw = jnp.moveaxis(raw, 3, 2).reshape(len(raw), -1, LANES)
    return lax.bitcast_convert_type(raw, dtype)


def _bits(dtype: DTypeLike) -> jnp.dtype:
    """Return the unsigned integer of a dtype's width."""
    return jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
