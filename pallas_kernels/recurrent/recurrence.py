"""Defines the recurrences: a step of one token, a piece of several tokens, and the description of a whole batch.

A step is ``step(state, *of the token) -> (state, out)`` in float32. The axes of a state have the order of the pool: the
axis that a token's output sums over comes first, and axes of the output come last. So sums never run across the lanes
of a vector, and a state is read and written row by row.

A piece takes several neighbouring tokens of a sequence at once, mostly as products of matrices. Decays are exponentials
of sums of logarithms between two tokens, none of which is positive.

A `Recurrence` is what the implementations that run any recurrence take; kernels of one kind of recurrence have their
arithmetic themselves, and are tested against these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.recurrent.layout import StatePlace

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


_LEAST = -128.0
"""The least logarithm of a decay: below it float32's exponential is 0 anyway."""
_GRID = 2.0**10
"""Steps of this fraction are summed up without rounding: `UNIT` numbers down to `_LEAST` have 23 bits in all."""

_dot = lax.Precision.HIGHEST


def sums_of_logs(logs: Float[Array, "tokens ..."]) -> tuple[Float[Array, "tokens ..."], Float[Array, "tokens ..."]]:
    """Return sums of each token's logarithm and all before it, as pairs to be subtracted one by one.

    The decay between two tokens is the difference of their sums. If the sums are long and the difference is short, it
    would lose its digits. So each logarithm is split: its multiple of 1 / `_GRID` is summed exactly, and the small rest
    is summed separately.
    """
    logs = jnp.maximum(logs, _LEAST)
    coarse = jnp.round(logs * _GRID) / _GRID
    lower = jnp.tril(jnp.ones((len(logs), len(logs)), logs.dtype))
    coarse_sum, rest = (jnp.tensordot(lower, part, axes=1, precision=_dot) for part in (coarse, logs - coarse))
    return coarse_sum, rest


def decays_between(logs: Float[Array, "tokens ..."]) -> Float[Array, "... tokens tokens"]:
    """Return the decay from the second token to the first where that is no later, else 0."""
    tokens = len(logs)
    parts = [jnp.moveaxis(part, 0, -1) for part in sums_of_logs(logs)]
    between = sum(part[..., :, None] - part[..., None, :] for part in parts)
    earlier = jnp.tril(jnp.ones((tokens, tokens), bool))
    return jnp.where(earlier, jnp.exp(jnp.where(earlier, between, 0.0)), 0.0)


def conv_piece(
    state: Float[Array, "width-1 ch"],
    length: Int[Array, ""],
    x: Float[Array, "tokens ch"],
    *,
    weight: Float[Array, "ch width"],
    bias: Float[Array, " ch"] | None,
    activation: Activation,
) -> tuple[Float[Array, "width-1 ch"], Float[Array, "tokens ch"]]:
    """Add up as many shifted copies of the inputs as the convolution is wide."""
    inputs, tokens = jnp.concatenate([state, x]), len(x)
    taps = (inputs[tap : tap + tokens] * weight[:, tap] for tap in range(weight.shape[1]))
    y = sum(taps, jnp.zeros_like(x) if bias is None else bias)
    return lax.dynamic_slice_in_dim(inputs, length, len(state)), activated(y, activation)


def scan_piece(
    state: Float[Array, "n ch"],
    length: Int[Array, ""],
    x: Float[Array, "tokens ch"],
    dt: Float[Array, "tokens ch"],
    b: Float[Array, "tokens n"],
    c: Float[Array, "tokens n"],
    *,
    a: Float[Array, "ch n"],
    d: Float[Array, " ch"],
) -> tuple[Float[Array, "n ch"], Float[Array, "tokens ch"]]:
    """Scan the tokens as a tree (Blelloch, 1990).

    Each channel has its own decay for each state, so a piece cannot be computed as a product of matrices.
    """
    del length
    decay = jnp.exp(dt[:, None, :] * a.T)
    added = b[:, :, None] * (dt * x)[:, None, :]
    added = added.at[0].add(decay[0] * state)

    def both(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    _, states = lax.associative_scan(both, (decay, added))
    return states[-1], (c[:, :, None] * states).sum(axis=1) + d * x


def ssd_piece(
    state: Float[Array, "n g m p"],
    length: Int[Array, ""],
    x: Float[Array, "tokens g m p"],
    dt: Float[Array, "tokens g m"],
    b: Float[Array, "tokens g n"],
    c: Float[Array, "tokens g n"],
    *,
    a: Float[Array, "g m"],
    d: Float[Array, "g m"],
) -> tuple[Float[Array, "n g m p"], Float[Array, "tokens g m p"]]:
    """Attend over the piece and the state before it (arXiv 2405.21060, section 6)."""
    del length
    between = decays_between(dt * a)  # [g, m, tokens, tokens]
    since = between[..., 0] * jnp.exp(dt[0] * a)[..., None]  # from before the piece
    until = between[..., -1, :]
    weights = jnp.einsum("tgn,sgn->gts", c, b, precision=_dot)[:, None] * between
    inputs = dt[..., None] * x
    y = jnp.einsum("gmts,sgmp->tgmp", weights, inputs, precision=_dot)
    y += jnp.einsum("tgn,ngmp->tgmp", c, state, precision=_dot) * jnp.moveaxis(since, -1, 0)[..., None]
    kept = inputs * jnp.moveaxis(until, -1, 0)[..., None]
    state = since[..., -1][..., None] * state + jnp.einsum("sgn,sgmp->ngmp", b, kept, precision=_dot)
    return state, y + d[..., None] * x


def delta_piece(
    state: Float[Array, "h k v"],
    length: Int[Array, ""],
    q: Float[Array, "tokens h k"],
    k: Float[Array, "tokens h k"],
    v: Float[Array, "tokens h v"],
    log_decay: Float[Array, "tokens h"],
    beta: Float[Array, "tokens h"],
) -> tuple[Float[Array, "h k v"], Float[Array, "tokens h v"]]:
    """Solve for the corrections of all tokens at once, then attend over them (arXiv 2412.06464, section 3.3).

    A token's correction is its correction without the others, minus the share that earlier tokens' corrections already
    cover. This is a triangular system; its solution is the product of UT transforms in the paper.
    """
    del length
    q, k, v, beta = (jnp.moveaxis(of, 0, 1) for of in (q, k, v, beta))
    between = decays_between(log_decay)  # [h, tokens, tokens]
    since = (between[..., 0] * jnp.exp(log_decay[0])[..., None])[..., None]
    until = between[..., -1, :]
    overlaps = jnp.einsum("htk,hsk->hts", k, k, precision=_dot) * between * beta[..., None]
    alone = beta[..., None] * (v - since * jnp.einsum("htk,hkv->htv", k, state, precision=_dot))
    corrections = lax.linalg.triangular_solve(
        jnp.tril(overlaps, -1), alone, left_side=True, lower=True, unit_diagonal=True
    )
    weights = jnp.einsum("htk,hsk->hts", q, k, precision=_dot) * between
    out = jnp.einsum("hts,hsv->thv", weights, corrections, precision=_dot)
    out += jnp.moveaxis(since * jnp.einsum("htk,hkv->htv", q, state, precision=_dot), 0, 1)
    kept = jnp.einsum("hsk,hsv->hkv", k * until[..., None], corrections, precision=_dot)
    return since[:, -1:] * state + kept, out


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
    step, piece = (partial(of, weight=weight, bias=bias, activation=activation) for of in (conv_step, conv_piece))
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
    step, piece = (partial(of, a=a, d=d) for of in (scan_step, scan_piece))
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
    step, piece = (partial(of, a=a, d=d) for of in (ssd_step, ssd_piece))
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
    return Recurrence(place, (q, k, v, log_decay, beta), _like(v), delta_step, delta_piece)


def _wide(*arrays: Array | None) -> tuple[Any, ...]:
    return tuple(None if array is None else array.astype(jnp.float32) for array in arrays)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
