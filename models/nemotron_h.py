"""Nemotron-H and Nemotron 3 (NVIDIA, 2025): each layer is one block, a Mamba-2, attention, an MLP or experts.

Attention knows no positions. MLPs have no gates and square what is above zero; experts, chosen as DeepSeek-V3's, may
work in a narrower space that two projections lead into and out of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import Attend, BuildContext, LayerRef, WeightSource

from . import weights as convert
from .attention import Attention, Heads
from .decoder import Decoder, check_model_type
from .experts import ExpertMLPs
from .groups import layer_groups, state_groups
from .layers import FeedForward, RMSNorm, check_activation
from .linear import Linear, LiveRows
from .mixture import ExpertLayout
from .recurrent.convolution import check_silu
from .recurrent.mamba2 import Mamba2, Mamba2Sizes
from .recurrent.slots import Slots
from .routing import Router, sigmoid_routing
from .stack import LayerKind, PendingResidual, Shared

_KINDS = {
    "linear_attention": LayerKind("state"),
    "full_attention": LayerKind("full"),
    "mlp": LayerKind(None, "mlp"),
    "moe": LayerKind(None, "experts"),
}
_PARTS = ("up_proj", "down_proj")


class NemotronMLP(FeedForward):
    """`FeedForward` under the names of Nemotron's checkpoints."""

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:  # type: ignore[override]
        yield from super().weights(path, name, layer, names=_PARTS)


class NemotronExperts(nnx.Module):
    """``shared(x) + out(sum_e share_e * mlp_e(into(x)))``.

    Parameters: router; experts; shared; into [embed, latent] and out [latent, embed], where experts work in a narrower
    space.
    """

    def __init__(self, config: Any, activation: str, build: BuildContext):
        size, latent, bias = config.hidden_size, config.moe_latent_size, config.mlp_bias
        layout = ExpertLayout(config.n_routed_experts, build.tensor_parallel, build.expert_parallel)
        self.router = Router(size, layout.experts, sigmoid_routing(config), build, corrected=True)
        self.experts = ExpertMLPs(
            latent or size, config.moe_intermediate_size, activation, build, layout=layout, gated=False
        )
        self.shared = NemotronMLP(size, config.moe_shared_expert_intermediate_size, activation, build, bias=bias)
        whole = P(None, None)
        self.into = None if latent is None else Linear(size, latent, build, partition=whole, bias=bias)
        self.out = None if latent is None else Linear(latent, size, build, partition=whole, bias=bias)

    def __call__(self, x: Float[Array, "tokens embed"], live_rows: LiveRows = None) -> Float[Array, "tokens embed"]:
        inside = x if self.into is None else self.into(x, live_rows)
        found = self.experts(inside, *self.router(x, live_rows))
        return self.shared(x, live_rows) + (found if self.out is None else self.out(found, live_rows))

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of the block `name`."""
        yield from self.router.weights((*path, "router"), f"{name}.gate", layer)
        yield from self.experts.weights((*path, "experts"), f"{name}.experts", layer, _PARTS)
        yield from self.shared.weights((*path, "shared"), f"{name}.shared_experts", layer)
        for attribute, stored, module in (
            ("into", "fc1_latent_proj", self.into),
            ("out", "fc2_latent_proj", self.out),
        ):
            if module is not None:
                matrix = convert.linear(*module.weight.shape[-2:])
                yield from module.weights((*path, attribute), (f"{name}.{stored}",), layer, matrix)


class NemotronLayer(nnx.Module):
    """``x += mixer(norm(x))``; parameters: norm, mixer."""

    takes_pending_residual = True

    def __init__(self, size: int, eps: float, mixer: Any, build: BuildContext):
        self.norm = RMSNorm(size, eps, build)
        self.mixer = mixer

    def __call__(
        self,
        hidden: PendingResidual | Float[Array, "tokens embed"],
        shared: Shared,
        cache: Any,
        ref: LayerRef | None,
        attend: Attend,
    ) -> tuple[PendingResidual, Any]:
        hidden, normed = self.norm.norm_residual(hidden)
        if ref is None:
            return PendingResidual(hidden, self.mixer(normed, shared.live_rows)), cache
        mixed, cache = self.mixer(normed, shared, cache, ref, attend)
        return PendingResidual(hidden, mixed), cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of layer number `layer`, whose tensors begin with `name`."""
        yield from self.norm.weights(("norm",), f"{name}.norm", layer)
        yield from self.mixer.weights(("mixer",), f"{name}.mixer", layer)


class NemotronH(Decoder):
    """`jpaged.model_api.CausalLM` for Nemotron-H; `config` is a Hugging Face ``NemotronHConfig``."""

    _prefix = "backbone"
    _embed_name = "embeddings"
    _norm_name = "norm_f"
    reads_separate_experts = True
    """Reads each expert's tensors by names of their own; a checkpoint may hold those of all experts in one."""

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("nemotron_h",))
        check_silu(config.mamba_hidden_act)
        activation = check_activation(config.mlp_hidden_act, "mlp_hidden_act")
        size, eps, head_dim = config.hidden_size, config.layer_norm_epsilon, config.head_dim
        kinds = tuple(_KINDS[name] for name in config.layers_block_type)
        self._has_experts = any(kind.variant == "experts" for kind in kinds)
        heads = Heads.of(config.num_attention_heads, config.num_key_value_heads, head_dim, build)
        said = "mamba_num_heads and n_groups"
        sizes = Mamba2Sizes(
            embed=size,
            head_dim=config.mamba_head_dim,
            state=config.ssm_state_size,
            conv_width=config.conv_kernel,
            conv_bias=config.use_conv_bias,
            proj_bias=config.use_bias,
            eps=eps,
            step_limits=(config.time_step_min, math.inf),  # as transformers, which does not read time_step_limit
            slots=Slots.of(config.mamba_num_heads, config.n_groups, build.tensor_parallel, said),
        )

        def mixer(kind: LayerKind, build: BuildContext) -> Mamba2 | Attention | NemotronMLP | NemotronExperts:
            if kind.group == "state":
                return Mamba2(sizes, build)
            if kind.group == "full":
                return Attention(size, heads, build, scale=head_dim**-0.5)
            if kind.variant == "experts":
                return NemotronExperts(config, activation, build)
            return NemotronMLP(size, config.intermediate_size, activation, build, bias=config.mlp_bias)

        def make(kind: LayerKind, build: BuildContext) -> NemotronLayer:
            return NemotronLayer(size, eps, mixer(kind, build), build)

        attention = layer_groups(kinds, heads.layout.kv_heads, head_dim, q_per_kv=heads.layout.q_per_kv)
        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=(*attention, *state_groups(kinds, sizes.state_parts(build))),
            rotary={group.name: None for group in attention},
            norm=RMSNorm(size, eps, build),
        )
