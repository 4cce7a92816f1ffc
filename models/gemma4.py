"""Gemma 4, text only (Gemma Team, 2026): local and global layers with heads of different widths and numbers.

Besides the hidden state, every layer gets a small vector for each token, from its own table (per-layer embeddings).
The last layers may keep no KV and read that of the last layer of their type that does. Global layers may use their keys
as values, and rotate a part of a head. Some models have experts next to the MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import (
    TENSOR_AXIS,
    Attend,
    BuildContext,
    LayerGroup,
    LayerRef,
    WeightSource,
    padded,
)

from . import weights as convert
from .attention import Attention, Heads
from .decoder import Decoder, check_model_type
from .gemma4_experts import Gemma4Experts
from .groups import KVSize, kinds_from_types, sized_groups, type_of_group
from .layers import ACTIVATIONS, GatedMLP, RMSNorm, check_activation
from .linear import Embedding, Linear, LiveRows
from .mixture import ExpertLayout
from .parameters import constant_param
from .rope import rotary_from_config
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
        self.own_input = OwnInput(config, build) if config.hidden_size_per_layer_input else None
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


class OwnInputs(nnx.Module):
    """Makes each layer's input of a token: half from a table, half from the token's hidden state.

    table [vocab, layers * width]; projection [embed, layers * width]; norm over width.
    """

    def __init__(self, config: Any, build: BuildContext):
        self.layers, self.width = config.num_hidden_layers, config.hidden_size_per_layer_input
        columns, self.vocab = self.layers * self.width, config.vocab_size_per_layer_input
        rows = padded(self.vocab, build.tensor_parallel)
        self.table = Embedding(rows, columns, build, partition=P(TENSOR_AXIS, None))
        self.projection = Linear(config.hidden_size, columns, build, partition=P(None, None))
        self.norm = RMSNorm(self.width, config.rms_norm_eps, build)

    def __call__(
        self, tokens: Int[Array, " tokens"], hidden: Float[Array, "tokens embed"], live_rows: LiveRows
    ) -> Float[Array, "layers tokens width"]:
        shape = len(tokens), self.layers, self.width
        projected = self.projection(hidden, live_rows) * jnp.asarray(hidden.shape[-1] ** -0.5, hidden.dtype)
        looked_up = self.table(tokens) * jnp.asarray(self.width**0.5, hidden.dtype)
        both = self.norm(projected.reshape(shape)) + looked_up.reshape(shape)
        return (both * jnp.asarray(2**-0.5, hidden.dtype)).swapaxes(0, 1)

    def weights(self, path: tuple[str, ...], name: str) -> Iterator[WeightSource]:
        """Yield the sources of the model `name`'s tensors that have to do with the layers' own inputs."""
        rows, columns = self.table.weight.shape
        matrix = convert.linear(self.projection.weight.shape[0], columns)
        tensor = (f"{name}.per_layer_model_projection",)
        by_row = convert.vocab_rows(self.vocab, rows)
        yield from self.table.weights((*path, "table"), f"{name}.embed_tokens_per_layer", by_row)
        yield from self.projection.weights((*path, "projection"), tensor, None, matrix)
        yield from self.norm.weights((*path, "norm"), f"{name}.per_layer_projection_norm")


class Gemma4(Decoder):
    """`jpaged.model_api.CausalLM`; `config` is a Hugging Face ``Gemma4TextConfig``."""

    _has_experts = True

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("gemma4_text",))
        if config.use_bidirectional_attention == "all":
            raise ValueError("use_bidirectional_attention='all' is not supported: attention is causal")
        if build.expert_parallel and not config.enable_moe_block:
            raise ValueError("enable_expert_parallel=True, but enable_moe_block=False: there are no experts")
        kinds = _kinds(config)
        heads = _heads(config, kinds, build)
        layout = None
        if config.enable_moe_block:
            layout = ExpertLayout(config.num_experts, build.tensor_parallel, build.expert_parallel)

        def make(kind: LayerKind, build: BuildContext) -> Gemma4Layer:
            return Gemma4Layer(config, kind, heads[kind.group or ""], layout, build)

        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=_groups(config, kinds, heads),
            rotary={name: rotary_from_config(config, own.head_dim, type_of_group(name)) for name, own in heads.items()},
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps, build),
            logit_soft_cap=config.final_logit_softcapping,
        )
        self.own_inputs = OwnInputs(config, build) if config.hidden_size_per_layer_input else None

    def embed(
        self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"], live_rows: LiveRows = None
    ) -> Float[Array, "tokens embed"]:
        hidden = super().embed(tokens, positions, live_rows)
        return hidden * jnp.asarray(hidden.shape[-1] ** 0.5, hidden.dtype)

    def per_layer(
        self, tokens: Int[Array, " tokens"], hidden: Float[Array, "tokens embed"], live_rows: LiveRows
    ) -> Float[Array, "layers tokens width"] | None:
        return None if self.own_inputs is None else self.own_inputs(tokens, hidden, live_rows)

    def weights(self) -> Iterator[WeightSource]:
        yield from super().weights()
        if self.own_inputs is not None:
            yield from self.own_inputs.weights(("own_inputs",), self._prefix)


def _kinds(config: Any) -> tuple[LayerKind, ...]:
    """Return the layers' kinds: the last ``num_kv_shared_layers`` read the KV of others."""
    kinds, keeping = kinds_from_types(config), config.num_hidden_layers - config.num_kv_shared_layers
    kept = {kind.group for kind in kinds[: max(keeping, 0)]}
    if kept != {kind.group for kind in kinds}:
        raise ValueError(
            f"num_kv_shared_layers={config.num_kv_shared_layers} of {len(kinds)} layers leaves a type of layer_types "
            "without a layer that keeps KV"
        )
    return tuple(replace(kind, shares_kv=number >= keeping) for number, kind in enumerate(kinds))


def _heads(config: Any, kinds: tuple[LayerKind, ...], build: BuildContext) -> Mapping[str, Heads]:
    """Return each group's heads, which all its layers have."""
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


def _groups(config: Any, kinds: tuple[LayerKind, ...], heads: Mapping[str, Heads]) -> tuple[LayerGroup, ...]:
    def size(group: str) -> KVSize:
        layout = heads[group].layout
        return KVSize(layout.kv_heads, heads[group].head_dim, layout.q_per_kv)

    return sized_groups(kinds, size, config.sliding_window)
