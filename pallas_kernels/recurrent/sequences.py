"""Runs any recurrence over whole sequences from their first tokens, so that it can be differentiated.

It uses no pool, so there is neither a donated array nor a loop with a dynamic count, which JAX cannot differentiate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Shaped

from pallas_kernels.recurrent import causal_conv, gated_delta, recurrence, selective_scan, ssd
from pallas_kernels.recurrent.layout import UNIT, StatePlace


def _conv(
    place: StatePlace, x: Array, weight: Array, bias: Array | None, *, activation: recurrence.Activation = None
) -> recurrence.Recurrence:
    return recurrence.conv(place, x, weight, bias, activation)


_DESCRIBED: Mapping[Callable[..., Any], Callable[..., recurrence.Recurrence]] = {
    causal_conv: _conv,
    selective_scan: recurrence.scan,
    ssd: recurrence.ssd,
    gated_delta: recurrence.delta,
}


def over_sequences(
    kernel: Callable[..., Any],
    state: tuple[int, ...],
    real: Bool[Array, "batch tokens"],
    *operands: Array | None,
    **options: Any,
) -> Shaped[Array, "rows ..."]:
    """Return each token's output of a recurrence over sequences of one length, ``rows = batch * tokens``.

    The derivative recomputes states in pieces of `UNIT` tokens, so that only one state per piece is kept.

    Args:
        kernel: one of `pallas_kernels.recurrent`; `operands` and `options` are its own, sequence after sequence.
        state: shape of one sequence's state, as in the kernel's `place`.
        real: False for padding, which changes no state.
    """
    batch, tokens = real.shape
    what = _DESCRIBED[kernel](StatePlace(0, state, jnp.dtype("float32")), *operands, **options)
    pieces = -(-tokens // UNIT)
    behind = pieces * UNIT - tokens

    def in_pieces(of_tokens: Array) -> Array:
        """Order an array [rows, ...] as [pieces, UNIT, batch, ...]."""
        by_sequence = of_tokens.reshape(batch, tokens, *of_tokens.shape[1:])
        padded = jnp.pad(by_sequence, ((0, 0), (0, behind), *((0, 0),) * (of_tokens.ndim - 1)))
        return jnp.moveaxis(padded, 0, 1).reshape(pieces, UNIT, batch, *of_tokens.shape[1:])

    def token(states: Array, given: tuple[Array, ...]) -> tuple[Array, Array]:
        live, *operands = given
        after, out = jax.vmap(what.step)(states, *operands)
        return jnp.where(live.reshape(batch, *(1,) * (states.ndim - 1)), after, states), out

    def piece(states: Array, given: tuple[Array, ...]) -> tuple[Array, Array]:
        return lax.scan(token, states, given)

    wide = (operand.astype(jnp.float32) for operand in what.operands)
    given = (in_pieces(real.reshape(-1)), *(in_pieces(operand) for operand in wide))
    _, out = lax.scan(jax.checkpoint(piece), jnp.zeros((batch, *what.place.shape), jnp.float32), given)
    out = jnp.moveaxis(out.reshape(pieces * UNIT, batch, *out.shape[3:])[:tokens], 1, 0)
    shape = what.out.shape
    if kernel is ssd:  # its heads were paired with their groups
        assert operands[0] is not None
        shape = operands[0].shape
    return out.reshape(shape).astype(what.out.dtype)
