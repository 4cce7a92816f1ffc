"""Implements the choice of experts as a Pallas Mosaic TPU kernel: scores, the best of a token, and their shares.

XLA sorts every token's scores and gathers from them, in a dozen operations, each of which costs a TPU about 1,800
cycles. Here a token's experts are found one after the other, each as the largest of those that are left, in VMEM.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.expert_mlps.reference import DenseChoice

TILE = 128
"""Tokens of a turn of the grid, whose scores are transposed in whole registers."""
MOST_TOKENS = 512
"""The most tokens that a turn takes all at once, where they are no whole tiles."""
MOST_EXPERTS = 1024


def takes_logits(logits: jax.Array) -> bool:
    """Tell whether experts are chosen here: float32, tokens that are few or whole tiles, and not too many experts."""
    tokens, experts = logits.shape
    return logits.dtype == jnp.float32 and _tile(tokens) > 0 and experts <= MOST_EXPERTS


def _tile(tokens: int) -> int:
    """Return the tokens of a turn: whole lanes, or all of few; 0: neither."""
    return TILE if tokens % TILE == 0 else tokens if tokens <= MOST_TOKENS else 0


def route(
    logits: Float[Array, "tokens experts"],
    correction: Float[Array, " experts"] | None,
    *,
    per_token: int,
    scores: Literal["softmax", "sigmoid"],
    sums_to_one: bool,
    scale: float,
    added_to_sum: float,
    least_sum: float,
    dtype: jnp.dtype,
    interpret: bool | pltpu.InterpretParams = False,
) -> DenseChoice:
    """Return the choice of the `per_token` experts of each token with the largest ``scores(logits) + correction``.

    Of experts that are equal the first is chosen. An expert's share is its score, without the correction, times
    `scale`, rounded to `dtype`.

    Args:
        sums_to_one: whether the chosen scores are divided by ``max(their sum + added_to_sum, least_sum)``.

    Raises:
        ValueError: the logits are not what `takes_logits` says.
    """
    if not takes_logits(logits):
        raise ValueError(f"logits of {logits.shape} {logits.dtype} are not routed here: see takes_logits")
    tokens, experts = logits.shape
    tile = _tile(tokens)
    given = [logits] if correction is None else [logits, correction[None].astype(jnp.float32)]
    rest = [pl.BlockSpec((1, experts), lambda i: (0, 0))] * (len(given) - 1)
    share = pl.pallas_call(
        functools.partial(
            _kernel,
            per_token=per_token,
            softmax=scores == "softmax",
            sums_to_one=sums_to_one,
            scale=scale,
            added_to_sum=added_to_sum,
            least_sum=least_sum,
            dtype=dtype,
        ),
        out_shape=jax.ShapeDtypeStruct((experts, tokens), jnp.float32),
        grid=(tokens // tile,),
        in_specs=[pl.BlockSpec((tile, experts), lambda i: (i, 0)), *rest],
        out_specs=pl.BlockSpec((experts, tile), lambda i: (0, i)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="route",
    )(*given)
    return DenseChoice(share)


def _kernel(
    logits,
    *refs,
    per_token: int,
    softmax: bool,
    sums_to_one: bool,
    scale: float,
    added_to_sum: float,
    least_sum: float,
    dtype: jnp.dtype,
):
    """Choose the experts of a tile; all references are VMEM: logits [tokens, experts], in `refs` the correction [1,
    experts], if any, and the shares [experts, tokens]."""
    share, given = refs[-1], logits[...]
    if softmax:
        grown = jnp.exp(given - jnp.max(given, axis=1, keepdims=True))
        score = grown / jnp.sum(grown, axis=1, keepdims=True)
    else:
        score = 1 / (1 + jnp.exp(-given))
    left = given if len(refs) == 1 else score + refs[0][...]
    expert = jax.lax.broadcasted_iota(jnp.int32, given.shape, 1)
    chosen = jnp.zeros_like(given)
    for _ in range(per_token):
        best = jnp.max(left, axis=1, keepdims=True)
        first = jnp.min(jnp.where(left == best, expert, given.shape[1]), axis=1, keepdims=True)
        chosen = jnp.where(expert == first, score, chosen)
        left = jnp.where(expert == first, -jnp.inf, left)
    if sums_to_one:
        chosen = chosen / jnp.maximum(jnp.sum(chosen, axis=1, keepdims=True) + added_to_sum, least_sum)
    share[...] = (chosen * scale).astype(dtype).astype(jnp.float32).T
