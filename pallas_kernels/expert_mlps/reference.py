"""Defines expert_mlps in plain jnp: every token goes through every expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.stacked_row import StackedTable


class DenseChoice(NamedTuple):
    """Says how much of each token every expert gets.

    Attributes:
        share: float32, 0 where a token did not choose an expert.
        first: number of the first expert whose matrices are here; those of the others count as zero.
    """

    share: Float[Array, "experts tokens"]
    first: int | Int[Array, ""] = 0

    def here(self, experts: int) -> Float[Array, "here tokens"]:
        """Return the shares of the experts that are here, of which there are so many."""
        return jax.lax.dynamic_slice_in_dim(self.share, self.first, experts)


class Biases(NamedTuple):
    """Holds what is added to the products of experts.

    Attributes:
        gate_up: [layers, experts, columns], to the first product.
        down: [layers, experts, embed], to the second one.
        adds_down: whether it is; of several devices that have columns of each expert, only one adds it.
    """

    gate_up: StackedTable
    down: StackedTable
    adds_down: bool | Bool[Array, ""] = True


def dense_choice(
    share: Float[Array, "tokens per_token"], chosen: Int[Array, "tokens per_token"], experts: int
) -> DenseChoice:
    """Return the choice of tokens that name their experts, none of them twice."""
    # Tokens are the lanes and experts the sublanes of what is summed, in whole registers.
    numbers = jnp.arange(experts, dtype=chosen.dtype)[:, None]
    return DenseChoice(jnp.where(chosen.T[:, None] == numbers, share.T[:, None].astype(jnp.float32), 0).sum(axis=0))


def expert_mlps_reference(
    x: Float[Array, "tokens embed"],
    choice: DenseChoice,
    gate_up: Float[Array, "experts embed columns"],
    down: Float[Array, "experts mlp embed"],
    activate: Callable[..., Array],
    *,
    gated: bool,
    biases: Biases | None = None,
) -> Float[Array, "tokens embed"]:
    """See `pallas_kernels.expert_mlps.expert_mlps`; the tables are those of one layer."""
    both, of_down = _product("ti,eio->eto", x, gate_up), jnp.float32(0)
    if biases is not None:
        both = both + biases.gate_up.read()[:, None].astype(jnp.float32)
        of_down = jnp.where(biases.adds_down, biases.down.read()[:, None].astype(jnp.float32), 0)
    parts = jnp.split(both.astype(x.dtype), 2, axis=-1) if gated else [both.astype(x.dtype)]
    out = _product("etm,emo->eto", activate(*parts), down) + of_down
    return (out * choice.here(len(down))[..., None]).sum(axis=0)[:, : x.shape[1]].astype(x.dtype)


def _product(axes: str, *operands: Array) -> Float[Array, "experts tokens out"]:
    """Return a product in float32; XLA:CPU has none of bfloat16 operands with such a result."""
    return jnp.einsum(axes, *(one.astype(jnp.float32) for one in operands), precision=jax.lax.Precision.HIGHEST)
