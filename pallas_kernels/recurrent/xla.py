"""Runs any recurrence on any backend of XLA: many decodes at once, then the pieces of prompts one after another.

Their numbers are not known at compile time, so loops have dynamic counts. Loops carry the view, so that XLA updates it
in place.
"""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from pallas_kernels.recurrent.layout import CARRY, UNIT, Units, read_states, write_states
from pallas_kernels.recurrent.recurrence import Recurrence

STATES_BYTES = 16 * 2**20
"""Memory of the states of decodes that are computed together."""


def run(
    view: Shaped[Array, "blocks layers rows 128"],
    layer: int | Int[Array, ""],
    units: Units,
    recurrence: Recurrence,
) -> tuple[Shaped[Array, "blocks layers rows 128"], Shaped[Array, "tokens ..."]]:
    """Return the view and every token's output, 0 for tokens of no unit."""
    out = jnp.zeros(recurrence.out.shape, recurrence.out.dtype)
    if units.decodes_only:
        return _decodes(view, layer, units, recurrence, out)
    if units.most == 1:
        return _tokens(view, layer, units, recurrence, out)
    view, out = _decodes(view, layer, units, recurrence, out)
    return _pieces(view, layer, units, recurrence, out)


def behind_decodes(
    view: Shaped[Array, "blocks layers rows 128"],
    layer: int | Int[Array, ""],
    units: Units,
    recurrence: Recurrence,
    y: Shaped[Array, "decodes ..."],
) -> tuple[Shaped[Array, "blocks layers rows 128"], Shaped[Array, "tokens ..."]]:
    """Run the units after the decodes. The view already has the decodes' states, and `y` their outputs; other rows of
    `y` may be anything."""
    out, live = jnp.zeros(recurrence.out.shape, recurrence.out.dtype), jnp.arange(len(y)) < units.num_decodes
    out = _put(out, y, 0, live)
    return (view, out) if units.decodes_only else _pieces(view, layer, units, recurrence, out)


def _decodes(view, layer, units, recurrence, out):
    """Run the decodes, `together` at a time: each token reads and writes its own state."""
    place, most = recurrence.place, min(len(out), len(units.read))
    together = min(most, max(1, STATES_BYTES // (prod(place.shape) * place.dtype.itemsize)))

    def some(number, carry):
        view, out = carry
        # The last turn begins earlier, so that its slice fits; `live` leaves out the rows that an earlier turn
        # computed.
        start = jnp.minimum(number * together, most - together)
        row = start + jnp.arange(together)
        live = (row >= number * together) & (row < units.num_decodes)
        read, write = (_some(of, start, together) for of in (units.read, units.write))
        states = read_states(view, layer, place, jnp.where(live, read, -1)).astype(jnp.float32)
        operands = (_masked(_some(operand, start, together), live) for operand in recurrence.operands)
        states, y = jax.vmap(recurrence.step)(states, *operands)
        view = write_states(view, layer, place, jnp.where(live, write, -1), states)
        return view, _put(out, y, start, live)

    if together == most and units.decodes_only:
        return some(0, (view, out))
    return lax.fori_loop(0, -(-units.num_decodes // together), some, (view, out))


def _tokens(view, layer, units, recurrence, out):
    """Run tokens one after another, each as a separate unit; see `_carried`."""
    live = jnp.ones(1, bool)

    def token(number, state, out):
        at = units.start[number]
        operands = (_masked(_some(operand, at, 1), live)[0] for operand in recurrence.operands)
        state, y = recurrence.step(state, *operands)
        return state, _put(out, y[None], at, live)

    return _carried(view, layer, units, recurrence, out, token, 0)


def _pieces(view, layer, units, recurrence, out):
    """Run the units after the decodes, one after another; see `_carried`."""
    tokens, longest = len(out), min(UNIT, len(out))
    behind = longest - 1
    # A unit's slice has a static length, `longest`, and may reach beyond the last token: pad by as much.
    padded = [jnp.pad(operand, ((0, behind), *((0, 0),) * (operand.ndim - 1))) for operand in recurrence.operands]

    def piece(number, state, out):
        at, length = units.start[number], units.length[number]
        live = jnp.arange(longest) < length
        operands = (_masked(_some(operand, at, longest), live) for operand in padded)
        state, y = recurrence.piece(state, length, *operands)
        return state, _put(out, y, at, live)

    out = jnp.pad(out, ((0, behind), *((0, 0),) * (out.ndim - 1)))
    view, out = _carried(view, layer, units, recurrence, out, piece, units.num_decodes)
    return view, out[:tokens]


def _carried(view, layer, units, recurrence, out, take, first):
    """Run ``take(unit, state, out) -> (state, out)`` for units from `first` on. Each starts from the state that it
    reads or, with `CARRY`, from that of the unit before it."""
    place = recurrence.place

    def unit(number, carry):
        view, state, out = carry
        read, write = units.read[number], units.write[number]
        state = jnp.where(read == CARRY, state, read_states(view, layer, place, read[None])[0])
        state, out = take(number, state.astype(jnp.float32), out)
        state = state.astype(place.dtype)
        return write_states(view, layer, place, write[None], state[None]), state, out

    view, _, out = lax.fori_loop(first, units.num_units, unit, (view, jnp.zeros(place.shape, place.dtype), out))
    return view, out


def _some(array: Shaped[Array, "tokens ..."], start: Int[Array, ""], number: int) -> Shaped[Array, "number ..."]:
    return lax.dynamic_slice_in_dim(array, start, number)


def _masked(x: Shaped[Array, "number ..."], live: Bool[Array, " number"]) -> Shaped[Array, "number ..."]:
    """Return x in float32, with 0 for rows that are not live, which may hold anything, even NaN."""
    return jnp.where(live.reshape(-1, *(1,) * (x.ndim - 1)), x.astype(jnp.float32), 0.0)


def _put(out: Shaped[Array, "tokens ..."], y, start, live) -> Shaped[Array, "tokens ..."]:
    """Return `out` with the rows of y that are live from `start` on."""
    before = _some(out, start, len(live))
    y = jnp.where(live.reshape(-1, *(1,) * (out.ndim - 1)), y.astype(out.dtype), before)
    return lax.dynamic_update_slice_in_dim(out, y, start, 0)
