"""Chooses a token's experts, and says how much each counts: softmax or sigmoid, among groups of experts or all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jpaged.model_api import BuildContext, WeightSource
from pallas_kernels.expert_mlps import DenseChoice, dense_choice, route, takes_logits
from pallas_kernels.platform import Impl

from . import weights as convert
from .linear import Linear, LiveRows
from .shards import each_shard


@dataclass(frozen=True)
class Routing:
    """Says how experts are chosen from a router's logits.

    Attributes:
        per_token: experts of a token.
        scores: function from logits to scores, over all experts.
        sums_to_one: whether the chosen experts' scores are divided by their sum.
        scale: multiplies the scores of the chosen experts.
        groups, groups_chosen: only experts of the best groups are chosen, as many of each (DeepSeek-V2, 2024, section
            2.2.2).
        best_of_group: a group's score is the sum of this number of its best scores.
        added_to_sum, least_sum: the sum that divides the scores is ``max(sum + added_to_sum, least_sum)``.
    """

    per_token: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    sums_to_one: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_chosen: int = 1
    best_of_group: int = 1
    added_to_sum: float = 1e-20
    least_sum: float = 0.0

    def check(self, experts: int) -> None:
        """Raise ValueError unless this routing can choose from that number of experts."""
        if experts % self.groups or experts // self.groups < self.best_of_group:
            raise ValueError(f"n_group={self.groups} does not cut {experts} experts into groups to choose from")
        if not 1 <= self.groups_chosen <= self.groups:
            raise ValueError(f"topk_group={self.groups_chosen} must be from 1 to n_group={self.groups}")
        if self.per_token is None:
            raise ValueError("num_experts_per_tok is null; it must be the number of experts of a token")
        most = experts // self.groups * self.groups_chosen
        if not 1 <= self.per_token <= most:
            raise ValueError(f"num_experts_per_tok={self.per_token} must be from 1 to the {most} experts chosen from")

    def choose(
        self, logits: Float[Array, "tokens experts"], correction: Float[Array, " experts"] | None = None
    ) -> tuple[Float[Array, "tokens per_token"], Int[Array, "tokens per_token"]]:
        """Return the shares of each token's experts and their numbers.

        Args:
            correction: is added to the scores to choose by, not to the shares (DeepSeek-V3, 2024, section 2.1.2).
        """
        scores = jax.nn.softmax(logits) if self.scores == "softmax" else jax.nn.sigmoid(logits)
        # A score grows with its logit, which is more exact; but a sum of scores is no sum of logits.
        plain = logits if self.best_of_group == 1 else scores
        worth = plain if correction is None else scores + correction
        if self.groups > 1:
            worth = jnp.where(self._in_chosen_groups(worth), worth, -jnp.inf)
        chosen = jax.lax.top_k(worth, self.per_token)[1]
        shares = jnp.take_along_axis(scores, chosen, axis=1)
        if self.sums_to_one:
            total = shares.sum(axis=1, keepdims=True) + self.added_to_sum
            shares = shares / jnp.maximum(total, self.least_sum)
        return shares * self.scale, chosen

    def dense(
        self,
        logits: Float[Array, "tokens experts"],
        correction: Float[Array, " experts"] | None,
        dtype: jnp.dtype,
        impl: Impl,
    ) -> DenseChoice:
        """Return the choice of `choose` in rows of all experts, shares rounded to `dtype`; logits are float32."""
        if impl not in ("tpu", "tpu_interpret") or not takes_logits(logits) or self.groups > 1:
            shares, chosen = self.choose(logits, correction)
            return dense_choice(shares.astype(dtype), chosen, logits.shape[1])

        def on_shard(logits: Array, correction: Array | None) -> Array:
            return route(
                logits,
                correction,
                per_token=self.per_token,
                scores=self.scores,
                sums_to_one=self.sums_to_one,
                scale=self.scale,
                added_to_sum=self.added_to_sum,
                least_sum=self.least_sum,
                dtype=dtype,
                interpret=impl == "tpu_interpret",
            ).share

        return DenseChoice(each_shard(on_shard, P(), P())(logits, correction))

    def _in_chosen_groups(self, worth: Float[Array, "tokens experts"]) -> Bool[Array, "tokens experts"]:
        tokens, experts = worth.shape
        of_group = jax.lax.top_k(worth.reshape(tokens, self.groups, -1), self.best_of_group)[0].sum(axis=2)
        best = jax.lax.top_k(of_group, self.groups_chosen)[1]
        is_chosen = (best[:, :, None] == jnp.arange(self.groups)).any(axis=1)
        return jnp.repeat(is_chosen, experts // self.groups, axis=1)


def sigmoid_routing(config: Any) -> Routing:
    """Return DeepSeek-V3's routing, which several families took over with its fields in the config.

    Where ``n_group`` and ``topk_group`` are null, experts are chosen among all.
    """
    return Routing(
        config.num_experts_per_tok,
        "sigmoid",
        sums_to_one=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        groups=config.n_group or 1,
        groups_chosen=config.topk_group or 1,
        best_of_group=2 if (config.n_group or 1) > 1 else 1,
    )


class Router(nnx.Module):
    """Scores experts by one product, in float32, and chooses.

    Parameters: linear.weight [embed, experts]; correction [experts], float32, where the family has one.

    Raises:
        ValueError: so many experts or groups cannot be chosen, see `Routing.check`.
    """

    def __init__(self, embed: int, experts: int, routing: Routing, build: BuildContext, *, corrected: bool = False):
        routing.check(experts)
        self.linear = Linear(embed, experts, build, partition=P(None, None))
        self.correction = nnx.Param(jnp.zeros(experts, jnp.float32)) if corrected else None
        self.routing = routing
        self.impl = build.product_impl

    def __call__(
        self, x: Float[Array, "tokens embed"], live_rows: LiveRows = None
    ) -> tuple[Float[Array, "tokens per_token"], Int[Array, "tokens per_token"]]:
        """Return the shares of each token's experts, in the dtype of `x`, and their numbers."""
        shares, chosen = self.routing.choose(*self._scored(x, live_rows))
        return shares.astype(x.dtype), chosen

    def dense(self, x: Float[Array, "tokens embed"], live_rows: LiveRows = None) -> DenseChoice:
        """Return the shares of each token's experts in rows of all experts, rounded to the dtype of `x`."""
        return self.routing.dense(*self._scored(x, live_rows), x.dtype, self.impl)

    def _scored(self, x: Array, live_rows: LiveRows) -> tuple[Array, Array | None]:
        """Return the logits of tokens, and what corrects the choice."""
        correction: Any = None if self.correction is None else self.correction[...]
        return self.linear(x.astype(jnp.float32), live_rows), correction

    def weights(
        self, path: tuple[str, ...], name: str, layer: int, correction: str | None = None
    ) -> Iterator[WeightSource]:
        """Yield the sources of ``{name}.weight`` and, where there is one, of the tensor `correction`, by default
        ``{name}.e_score_correction_bias``."""
        matrix = convert.linear(*self.linear.weight.shape[-2:])
        yield from self.linear.weights((*path, "linear"), (name,), layer, matrix, may_quantise=False)
        if self.correction is not None:
            bias = correction or f"{name}.e_score_correction_bias"
            yield WeightSource((*path, "correction"), (bias,), lambda stored: stored.reshape(-1), P(None), layer)
