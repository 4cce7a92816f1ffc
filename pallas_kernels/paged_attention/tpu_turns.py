"""Does what both bodies of the TPU kernel do around the steps of a unit: its block of results, its keys, its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.counting_loop import loop
from pallas_kernels.paged_attention.reference import Reach
from pallas_kernels.paged_attention.tpu_new_rows import NewRows
from pallas_kernels.paged_attention.tpu_ring import Ring
from pallas_kernels.paged_attention.tpu_units import BLOCK_ROWS, Units, write_side_by_side
from pallas_kernels.paged_attention.tpu_unseen import MissingBlocks


def visit_units(visit: Callable[[Any], None], first: Any, at_once: int, count: int) -> None:
    """Call ``visit(unit)`` for the units of a turn of the grid from unit `first` on, `at_once` of `count` at most."""
    if at_once == 1:
        visit(first)
    else:
        loop(0, jnp.minimum(at_once, count - first))(lambda i: visit(first + i))


def prime(ring: Ring, missing: MissingBlocks, new: NewRows | None) -> None:
    """Prepare what lives from the first unit to the last."""
    missing.forget()
    ring.prime()
    if new is not None:
        new.prime()


def begin_block(units: Units, unit: Any, into: Sequence[Any], out: Any) -> None:
    """Begin a block of results that lie side by side, where `unit` is the first in it.

    Blocks of units of one row begin as `into`, the prompts' result; the units after the live ones name the last live
    one's block again. Those of prompts, a tile each, begin with zeros.
    """
    rows = BLOCK_ROWS if into else 1
    block, before = (lax.div(units.tile[at], rows) for at in (unit, jnp.maximum(unit - 1, 0)))
    begins = (block != before) & (unit < units.num_units[0]) if into else block != before

    @pl.when((unit == 0) | begins)
    def _():
        out[...] = into[0][...] if into else jnp.zeros_like(out)


def steps_of(units: Units, unit: Any, step_pages: int) -> Any:
    """Return the number of steps that a unit's pages take; at least one, which writes its result."""
    return jnp.maximum(lax.div(units.num_pages[unit] + (step_pages - 1), step_pages), 1)


def seen_by_row(units: Units, unit: Any, reach: Reach, start: Any, penalty: Any, shape: tuple[int, int]) -> Any:
    """Return which keys from position `start` on a unit of one row sees, bool of `shape`, [rows, keys].

    `penalty`: see `MissingBlocks`.
    """
    key = start + lax.broadcasted_iota(jnp.int32, shape, 1) + penalty[:, : shape[1]]
    seen = key < units.key_stop[unit]
    if reach.limited:
        seen &= key >= units.key_start[unit]
    return seen


def write_row(out: Any, row: Any, result: Any, side_by_side: bool) -> None:
    """Write the result of a row of the batch into its block: [heads, rows, lanes], or heads `side_by_side`."""
    if side_by_side:
        own = lax.broadcasted_iota(jnp.int32, (BLOCK_ROWS, 1), 0) == lax.rem(row, BLOCK_ROWS)
        write_side_by_side(out, pl.ds(0, BLOCK_ROWS), result, own, 1)
    else:
        out[lax.rem(row, out.shape[0])] = result.astype(out.dtype)


def zero_dead_row(units: Units, unit: Any, out: Any) -> None:
    """Write zeros into the row of a unit that is not live; unit u is row u."""

    @pl.when(unit >= units.num_units[0])
    def _():
        out[lax.rem(unit, out.shape[0])] = jnp.zeros(out.shape[1:], out.dtype)
