"""Computes a layer of Gemma 4's models and of their assistants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import Attend, BuildContext, LayerRef, WeightSource

from . import weights as convert
from .attention import Attention, Heads
from .gemma4_experts import Gemma4Experts
from .layers import ACTIVATIONS, GatedMLP, RMSNorm, check_activation
from .linear import Linear, LiveRows
from .mixture import ExpertLayout
from .parameters import constant_param
from .stack import LayerKind, PendingResidual, Shared

_NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


class OwnInput(nnx.Module):
    """``x + norm(out(act(gate(x)) * own))``, `own` being the vectors that this layer is given.

    gate [embed, width] and out [width, embed] are held whole by every device: they are too small to be worth a sum
    over devices.
    """

    def __init__(self, config: Any, build: BuildContext):
        embed, width = config.hidden_size, config.hidden_size_per_layer_input
        self.gate = Linear(embed, width, build, partition=P(None, None))
        self.out = Linear(width, embed, build, partition=P(None, None))
        self.norm = RMSNorm(embed, config.rms_norm_eps, build)
        self.activation = config.hidden_activation

    def __call__(
        self, x: Float[Array, "tokens embed"], own: Float[Array, "tokens width"], live_rows: LiveRows
    ) -> Float[Array, "tokens embed"]:
        gated = ACTIVATIONS[self.activation](self.gate(x, live_rows)) * own
        return x + self.norm(self.out(gated, live_rows))

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of the layer `name`'s tensors that have to do with its own input."""
        embed, width = self.gate.weight.shape[-2:]
        gate, out = (f"{name}.per_layer_input_gate",), (f"{name}.per_layer_projection",)
        yield from self.gate.weights((*path, "gate"), gate, layer, convert.linear(embed, width))
        yield from self.out.weights((*path, "out"), out, layer, convert.linear(width, embed))
        yield from self.norm.weights((*path, "norm"), f"{name}.post_per_layer_input_norm", layer)


class Gemma4Layer(nnx.Module):
    """``x += norm(attention(norm(x))); x += norm(mlp(norm(x))); x = scalar * own_input(x)``, maybe with experts."""

    def __init__(self, config: Any, kind: LayerKind, heads: Heads, layout: ExpertLayout | None, build: BuildContext):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, build)
        self.attention = Attention(
            size,
            heads,
            build,
            scale=1.0,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            qk_norm=partial(RMSNorm, heads.head_dim, eps, build),
            shares_kv=kind.shares_kv,
            v_norm=RMSNorm(heads.head_dim, eps, build, affine=False),
            values_are_keys=config.attention_k_eq_v and kind.group == "full",
        )
        self.post_attention_norm = RMSNorm(size, eps, build)
        self.pre_mlp_norm = RMSNorm(size, eps, build)
        width = config.intermediate_size * (2 if config.use_double_wide_mlp and kind.shares_kv else 1)
        activation = check_activation(config.hidden_activation, "hidden_activation")
        self.mlp = GatedMLP(size, width, activation, build, bias=False)
        self.experts = None if layout is None else Gemma4Experts(config, layout, build)
        self.post_mlp_norm = RMSNorm(size, eps, build)
        self.own_input = OwnInput(config, build) if own_width(config) else None
        self.scalar = constant_param(build, (1,), 1.0)

    def __call__(
        self, hidden: Float[Array, "tokens embed"], shared: Shared, cache: Any, ref: LayerRef, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        mixed, cache = self.attention(self.input_norm(hidden), shared, cache, ref, attend)
        hidden, normed = self.pre_mlp_norm.norm_residual(
            PendingResidual(hidden, self.post_attention_norm.of_whole(mixed))
        )
        out = self.mlp(normed, shared.live_rows)
        if self.experts is not None:
            out = self.experts(out, hidden, shared.live_rows)
        hidden = hidden + self.post_mlp_norm(out)
        if self.own_input is not None and shared.per_layer is not None:
            hidden = self.own_input(hidden, shared.per_layer, shared.live_rows)
        return hidden * self.scalar[...], cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of layer number `layer`, whose tensors begin with `name`."""
        for attribute, tensor in _NORMS.items():
            yield from getattr(self, attribute).weights((attribute,), f"{name}.{tensor}", layer)
        yield from self.attention.weights(("attention",), f"{name}.self_attn", layer)
        yield from self.mlp.weights(("mlp",), f"{name}.mlp", layer)
        if self.experts is not None:
            yield from self.experts.weights(("experts",), name, layer)
        if self.own_input is not None:
            yield from self.own_input.weights(("own_input",), name, layer)
        yield WeightSource(("scalar",), (f"{name}.layer_scalar",), convert.as_stored, P(None), layer)


def own_width(config: Any) -> int:
    """Return the width of the vectors that each layer is given of a token; 0 if the model has none."""
    return getattr(config, "hidden_size_per_layer_input", 0)


def heads_of_groups(config: Any, kinds: tuple[LayerKind, ...], build: BuildContext) -> Mapping[str, Heads]:
    """Return each group's heads, which all its layers have.

    Raises:
        ValueError: layers of one group have different heads.
    """
    found: dict[str, Heads] = {}
    for number, kind in enumerate(kinds):
        own = config.per_layer_config[number]
        heads = Heads.of(config.num_attention_heads, own.num_key_value_heads, own.head_dim, build)
        if found.setdefault(kind.group or "", heads) != heads:
            raise ValueError(
                f"layer {number} has head_dim={own.head_dim} and num_key_value_heads={own.num_key_value_heads}, "
                f"others of its type in layer_types have not; layers of one type must be alike"
            )
    return found
