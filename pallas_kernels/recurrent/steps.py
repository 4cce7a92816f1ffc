"""Holds the recurrences themselves: how one token updates the state and reads its output from it.

A step is ``step(state, *of the token) -> (state, out)`` in float32. The axes of a state have the order of the pool: the
axis that a token's output sums over comes first, and axes of the output come last. So sums never run across the lanes
of a vector, and a state is read and written row by row.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Activation: TypeAlias = Literal["silu"] | None


def conv_step(
    state: Float[Array, "width-1 ch"],
    x: Float[Array, " ch"],
    *,
    weight: Float[Array, "ch width"],
    bias: Float[Array, " ch"] | None,
    activation: Activation,
) -> tuple[Float[Array, "width-1 ch"], Float[Array, " ch"]]:
    """Return the inputs that the next token sees, and this token's output."""
    window = jnp.concatenate([state, x[None]])
    y = (window * weight.T).sum(axis=0)
    return window[1:], activated(y if bias is None else y + bias, activation)


def activated(y: Float[Array, "... ch"], activation: Activation) -> Float[Array, "... ch"]:
    """Return y after its activation, if any."""
    return y if activation is None else jax.nn.silu(y)


def scan_step(
    state: Float[Array, "n ch"],
    x: Float[Array, " ch"],
    dt: Float[Array, " ch"],
    b: Float[Array, " n"],
    c: Float[Array, " n"],
    *,
    a: Float[Array, "ch n"],
    d: Float[Array, " ch"],
) -> tuple[Float[Array, "n ch"], Float[Array, " ch"]]:
    """Take the step of Mamba (arXiv 2312.00752, section 3): every channel has a decay for each of its states."""
    state = jnp.exp(dt * a.T) * state + b[:, None] * (dt * x)
    return state, (c[:, None] * state).sum(axis=0) + d * x


def ssd_step(
    state: Float[Array, "n g m p"],
    x: Float[Array, "g m p"],
    dt: Float[Array, "g m"],
    b: Float[Array, "g n"],
    c: Float[Array, "g n"],
    *,
    a: Float[Array, "g m"],
    d: Float[Array, "g m"],
) -> tuple[Float[Array, "n g m p"], Float[Array, "g m p"]]:
    """Take the step of Mamba-2 (arXiv 2405.21060, section 6): the m heads of a group share b and c; a head has one
    decay."""
    decay, (b, c) = jnp.exp(dt * a)[..., None], (of_group.T[:, :, None, None] for of_group in (b, c))
    state = decay * state + b * (dt[..., None] * x)
    return state, (c * state).sum(axis=0) + d[..., None] * x


def delta_step(
    state: Float[Array, "h k v"],
    q: Float[Array, "h k"],
    k: Float[Array, "h k"],
    v: Float[Array, "h v"],
    log_decay: Float[Array, " h"],
    beta: Float[Array, " h"],
) -> tuple[Float[Array, "h k v"], Float[Array, "h v"]]:
    """Take the step of gated DeltaNet (arXiv 2412.06464, equation 10): the state's value for k moves towards v."""
    state = jnp.exp(log_decay)[:, None, None] * state
    correction = beta[:, None] * (v - (k[:, :, None] * state).sum(axis=1))
    state = state + k[:, :, None] * correction[:, None, :]
    return state, (q[:, :, None] * state).sum(axis=1)
