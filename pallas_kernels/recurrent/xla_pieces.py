"""Takes several neighbouring tokens of a sequence through a recurrence at once, mostly as products of matrices.

States lie as `pallas_kernels.recurrent.steps` says; all arrays are float32. Decays are exponentials of sums of
logarithms between two tokens, none of which is positive.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.recurrent.steps import Activation, activated

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
    """Scan the tokens as a tree (Blelloch, 1990): each channel has a separate decay for each state, so the piece is no
    product of matrices."""
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
