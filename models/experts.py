"""A mixture of experts: each token goes through the few MLPs its router picks (Shazeer et al., 2017)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import TENSOR_AXIS, WeightSource, padded

from . import weights as convert
from .layers import ACTIVATIONS, dot, random_param
from .mixture import ExpertLayout, by_expert, grouped_dot


class Experts(nnx.Module):
    """Gated MLPs, `per_token` of them for a token, whose input is weighted by the sigmoid of its score (Llama 4).

    router [embed, experts]; gate_up [experts, embed, 2 * mlp] and down [experts, mlp, embed], the columns of each
    expert as in `GatedMLP`. Tokens are sorted by expert, so that work follows the tokens, not the experts.
    """

    def __init__(
        self,
        embed: int,
        width: int,
        activation: str,
        *,
        layout: ExpertLayout,
        per_token: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        mlp = padded(width, layout.column_shards)
        self.router = random_param(rngs, (embed, layout.experts), dtype)
        self.gate_up = random_param(rngs, (layout.experts, embed, 2 * mlp), dtype)
        self.down = random_param(rngs, (layout.experts, mlp, embed), dtype)
        self.activation = activation
        self.layout = layout
        self.per_token = per_token

    def __call__(self, x: Float[Array, "tokens embed"]) -> Float[Array, "tokens embed"]:
        scores, chosen = jax.lax.top_k(dot(x, self.router[...]), self.per_token)
        share = jax.nn.sigmoid(scores.astype(jnp.float32)).astype(x.dtype)
        return self.layout.mix(self._mlps, x, share, chosen, (self.gate_up[...], self.down[...]))

    def _mlps(self, x: Array, share: Array, chosen: Array, tables: tuple[Any, Any]) -> Array:
        gate_up, down = tables
        rows = by_expert(chosen, down.shape[0])
        both = grouped_dot(x[rows.token] * share.reshape(-1)[rows.pair, None], gate_up, rows.counts)
        gate, up = jnp.split(both.reshape(len(both), self.layout.column_shards, -1), 2, axis=-1)
        inner = (ACTIVATIONS[self.activation](gate) * up).reshape(len(both), -1)
        return rows.combine(grouped_dot(inner, down, rows.counts), into=x)

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Tensors ``{name}.router.weight``, ``{name}.experts.gate_up_proj`` and ``{name}.experts.down_proj``."""
        (mlp, embed), layout = self.down.shape[-2:], self.layout
        fuse, pad = convert.split_gate_up(mlp, layout.column_shards), convert.pad_axis(1, mlp)
        sources: list[tuple[str, str, Callable, P]] = [
            ("router", "router.weight", convert.linear(embed, layout.experts), P(None, None)),
            ("gate_up", "experts.gate_up_proj", fuse, layout.partition(None, None, TENSOR_AXIS)),
            ("down", "experts.down_proj", pad, layout.partition(None, TENSOR_AXIS, None)),
        ]
        for param, tensor, how, partition in sources:
            contracted = None if param == "router" else -2
            yield WeightSource((*path, param), (f"{name}.{tensor}",), how, partition, layer, contracted)
