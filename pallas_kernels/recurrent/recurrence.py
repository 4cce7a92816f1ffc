"""Describes a recurrence over a batch to the implementations that run any recurrence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.recurrent import steps, xla_pieces
from pallas_kernels.recurrent.layout import StatePlace
from pallas_kernels.recurrent.steps import Activation


@dataclass(frozen=True)
class Recurrence:
    """A recurrence with its operands.

    Attributes:
        place: place of the state, with its axes in memory order.
        operands: arrays of the batch's tokens, ``[tokens, ...]``.
        out: shape and dtype of the result, ``[tokens, ...]``.
        step: ``step(state, *of one token) -> (state, out)``.
        piece: ``piece(state, length, *of some tokens) -> (state, out)``, the same for the first `length` of some
            neighbouring tokens at once; the other tokens' inputs are 0, and their outputs are ignored.
    """

    place: StatePlace
    operands: tuple[Array, ...]
    out: jax.ShapeDtypeStruct
    step: Callable[..., tuple[Array, Array]]
    piece: Callable[..., tuple[Array, Array]]


def conv(
    place: StatePlace,
    x: Float[Array, "tokens ch"],
    weight: Float[Array, "ch width"],
    bias: Float[Array, " ch"] | None,
    activation: Activation,
) -> Recurrence:
    """Describe `pallas_kernels.recurrent.causal_conv`."""
    weight, bias = _wide(weight, bias)
    channels, width = weight.shape
    step, piece = (
        partial(of, weight=weight, bias=bias, activation=activation) for of in (steps.conv_step, xla_pieces.conv_piece)
    )
    return Recurrence(place.lying(width - 1, channels), (x,), _like(x), step, piece)


def scan(
    place: StatePlace,
    x: Float[Array, "tokens ch"],
    dt: Float[Array, "tokens ch"],
    a: Float[Array, "ch n"],
    b: Float[Array, "tokens n"],
    c: Float[Array, "tokens n"],
    d: Float[Array, " ch"],
) -> Recurrence:
    """Describe `pallas_kernels.recurrent.selective_scan`."""
    a, d = _wide(a, d)
    step, piece = (partial(of, a=a, d=d) for of in (steps.scan_step, xla_pieces.scan_piece))
    return Recurrence(place.lying(*a.T.shape), (x, dt, b, c), _like(x), step, piece)


def ssd(
    place: StatePlace,
    x: Float[Array, "tokens h p"],
    dt: Float[Array, "tokens h"],
    a: Float[Array, " h"],
    b: Float[Array, "tokens g n"],
    c: Float[Array, "tokens g n"],
    d: Float[Array, " h"],
) -> Recurrence:
    """Describe `pallas_kernels.recurrent.ssd`; heads become pairs of a group and a head of it."""
    tokens, heads, width = x.shape
    groups, n = b.shape[1:]
    of_heads = (groups, heads // groups)
    a, d = (of.reshape(of_heads) for of in _wide(a, d))
    step, piece = (partial(of, a=a, d=d) for of in (steps.ssd_step, xla_pieces.ssd_piece))
    x, dt = x.reshape(tokens, *of_heads, width), dt.reshape(tokens, *of_heads)
    return Recurrence(place.lying(n, *of_heads, width), (x, dt, b, c), _like(x), step, piece)


def delta(
    place: StatePlace,
    q: Float[Array, "tokens h k"],
    k: Float[Array, "tokens h k"],
    v: Float[Array, "tokens h v"],
    log_decay: Float[Array, "tokens h"],
    beta: Float[Array, "tokens h"],
) -> Recurrence:
    """Describe `pallas_kernels.recurrent.gated_delta`."""
    return Recurrence(place, (q, k, v, log_decay, beta), _like(v), steps.delta_step, xla_pieces.delta_piece)


def _wide(*arrays: Array | None) -> tuple[Any, ...]:
    return tuple(None if array is None else array.astype(jnp.float32) for array in arrays)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
