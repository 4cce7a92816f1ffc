"""The experts that some models of Gemma 4 have next to each layer's MLP, and the router that picks them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import BuildContext, WeightSource

from . import weights as convert
from .experts import ExpertMLPs
from .layers import RMSNorm, check_activation
from .linear import LiveRows
from .mixture import ExpertLayout
from .parameters import constant_param
from .routing import Router, Routing

_NORMS = {
    "mlp_norm": "post_feedforward_layernorm_1",
    "pre_norm": "pre_feedforward_layernorm_2",
    "post_norm": "post_feedforward_layernorm_2",
}


class ScaledRouter(nnx.Module):
    """A `Router` of the normed hidden state, times a scale for each number, whose shares an expert's scale multiplies.

    Parameters: router; scale [embed]; expert_scale [experts].
    """

    def __init__(self, config: Any, experts: int, build: BuildContext):
        size = config.hidden_size
        self.norm = RMSNorm(size, config.rms_norm_eps, build, affine=False)
        self.router = Router(size, experts, Routing(config.top_k_experts, sums_to_one=True), build)
        self.scale = constant_param(build, (size,), 1.0)
        self.expert_scale = constant_param(build, (experts,), 1.0)

    def __call__(
        self, x: Float[Array, "tokens embed"], live_rows: LiveRows
    ) -> tuple[Float[Array, "tokens per_token"], Int[Array, "tokens per_token"]]:
        """Return the shares of each token's experts and their numbers."""
        x = self.norm(x) * self.scale[...] * x.shape[-1] ** -0.5
        shares, chosen = self.router(x, live_rows)
        return shares * self.expert_scale[...][chosen], chosen

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of ``{name}.proj.weight``, ``{name}.scale`` and ``{name}.per_expert_scale``."""
        yield from self.router.weights((*path, "router"), f"{name}.proj", layer)
        yield WeightSource((*path, "scale"), (f"{name}.scale",), convert.as_stored, P(None), layer)
        yield WeightSource((*path, "expert_scale"), (f"{name}.per_expert_scale",), convert.as_stored, P(None), layer)


class Gemma4Experts(nnx.Module):
    """Computes ``norm1(mlp) + norm2(experts(norm(x)))`` from the MLP's result and the block's input.

    Parameters: router, experts, and the norms of the MLP's result, of the experts' input and of theirs.
    """

    def __init__(self, config: Any, layout: ExpertLayout, build: BuildContext):
        size, eps = config.hidden_size, config.rms_norm_eps
        activation = check_activation(config.hidden_activation, "hidden_activation")
        self.router = ScaledRouter(config, layout.experts, build)
        self.experts = ExpertMLPs(size, config.moe_intermediate_size, activation, build, layout=layout)
        self.mlp_norm = RMSNorm(size, eps, build)
        self.pre_norm = RMSNorm(size, eps, build)
        self.post_norm = RMSNorm(size, eps, build)

    def __call__(
        self, mlp: Float[Array, "tokens embed"], x: Float[Array, "tokens embed"], live_rows: LiveRows
    ) -> Float[Array, "tokens embed"]:
        """Add the experts' result to the MLP's; `x` is the block's input before its norm."""
        return self.mlp_norm(mlp) + self.post_norm(self.experts(self.pre_norm(x), *self.router(x, live_rows)))

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of the layer `name`'s router, experts and the norms around them."""
        yield from self.router.weights((*path, "router"), f"{name}.router", layer)
        yield from self.experts.weights((*path, "experts"), f"{name}.experts", layer, outputs_first=True)
        for attribute, tensor in _NORMS.items():
            yield from getattr(self, attribute).weights((*path, attribute), f"{name}.{tensor}", layer)
