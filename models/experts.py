"""A mixture of experts: each token goes through the few MLPs its router picks (Shazeer et al., 2017)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import TENSOR_AXIS, WeightSource, padded
from pallas_kernels.quantised import QuantisedMatrix

from . import weights as convert
from .bank import Bank
from .layers import ACTIVATIONS, dot, random_param


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
        experts: int,
        per_token: int,
        tensor_parallel: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        mlp = padded(width, tensor_parallel)
        self.router = random_param(rngs, (embed, experts), dtype)
        self.gate_up = random_param(rngs, (experts, embed, 2 * mlp), dtype)
        self.down = random_param(rngs, (experts, mlp, embed), dtype)
        self.activation = activation
        self.experts = experts
        self.per_token = per_token
        self.shards = tensor_parallel

    def __call__(self, x: Float[Array, "tokens embed"]) -> Float[Array, "tokens embed"]:
        scores, chosen = jax.lax.top_k(dot(x, self.router[...]), self.per_token)
        share = jax.nn.sigmoid(scores.astype(jnp.float32)).astype(x.dtype).reshape(-1)
        order, token, counts = by_expert(chosen, self.experts)
        both = grouped_dot(x[token] * share[order, None], self.gate_up[...], counts)
        gate, up = jnp.split(both.reshape(len(token), self.shards, -1), 2, axis=-1)
        inner = (ACTIVATIONS[self.activation](gate) * up).reshape(len(token), -1)
        return jnp.zeros_like(x).at[token].add(grouped_dot(inner, self.down[...], counts))

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Tensors ``{name}.router.weight``, ``{name}.experts.gate_up_proj`` and ``{name}.experts.down_proj``."""
        mlp, embed = self.down.shape[-2:]
        fuse, pad = convert.split_gate_up(mlp, self.shards), convert.pad_axis(1, mlp)
        sources: list[tuple[str, str, Callable, P]] = [
            ("router", "router.weight", convert.linear(embed, self.experts), P(None, None)),
            ("gate_up", "experts.gate_up_proj", fuse, P(None, None, TENSOR_AXIS)),
            ("down", "experts.down_proj", pad, P(None, TENSOR_AXIS, None)),
        ]
        for param, tensor, how, partition in sources:
            contracted = None if param == "router" else -2
            yield WeightSource((*path, param), (f"{name}.{tensor}",), how, partition, layer, contracted)


def by_expert(
    chosen: Int[Array, "tokens per_token"], experts: int
) -> tuple[Int[Array, " rows"], Int[Array, " rows"], Int[Array, " experts"]]:
    """The pairs of a token and one of its experts, sorted by expert: their places in `chosen`, their tokens, and how
    many each expert has."""
    chosen, per_token = chosen.reshape(-1), chosen.shape[1]
    order = jnp.argsort(chosen)
    return order, order // per_token, jnp.bincount(chosen, length=experts)


def rows_of_expert(
    table: Float[Array, "experts outputs"] | Bank, expert: Int[Array, " rows"]
) -> Float[Array, "rows outputs"]:
    """Each row's expert's entry, such as its bias."""

    def pick(expert: Array, table: Array) -> Array:
        return table[expert]

    return table.multiply(pick, expert) if isinstance(table, Bank) else pick(expert, table)


def grouped_dot(
    x: Float[Array, "rows inputs"],
    weight: Float[Array, "experts inputs outputs"] | QuantisedMatrix | Bank,
    counts: Int[Array, " experts"],
) -> Float[Array, "rows outputs"]:
    """Rows, sorted by expert, each times its expert's matrix; the first ``counts[0]`` rows are expert 0's."""

    def product(x: Array, matrices: Array | QuantisedMatrix) -> Array:
        if isinstance(matrices, QuantisedMatrix):
            matrices = matrices.dequantised(x.dtype)
        precision = jax.lax.Precision.HIGHEST if matrices.dtype == jnp.float32 else None
        return jax.lax.ragged_dot(x, matrices, counts.astype(jnp.int32), precision=precision)

    return weight.multiply(product, x) if isinstance(weight, Bank) else product(x, weight)
