"""Runs any recurrence token by token, unit after unit, in plain jnp."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from pallas_kernels.recurrent.layout import CARRY, Units, read_states, write_states
from pallas_kernels.recurrent.recurrence import Recurrence


def run(
    view: Shaped[Array, "blocks layers rows 128"],
    layer: int | Int[Array, ""],
    units: Units,
    recurrence: Recurrence,
) -> tuple[Shaped[Array, "blocks layers rows 128"], Shaped[Array, "tokens ..."]]:
    """Return the view and every token's output, 0 for tokens of no unit."""
    place = recurrence.place

    def token(number, carry):
        state, out = carry
        operands = (operand[number].astype(jnp.float32) for operand in recurrence.operands)
        state, y = recurrence.step(state.astype(jnp.float32), *operands)
        return state.astype(place.dtype), out.at[number].set(y.astype(out.dtype))

    def unit(number, carry):
        view, state, out = carry
        read, start = units.read[number], units.start[number]
        state = jnp.where(read == CARRY, state, read_states(view, layer, place, read[None])[0])
        state, out = lax.fori_loop(start, start + units.length[number], token, (state, out))
        return write_states(view, layer, place, units.write[number][None], state[None]), state, out

    nothing = jnp.zeros(place.shape, place.dtype), jnp.zeros(recurrence.out.shape, recurrence.out.dtype)
    view, _, out = lax.fori_loop(0, units.num_units, unit, (view, *nothing))
    return view, out
