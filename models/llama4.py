"""Llama 4, text only (Meta, 2025): layers that see a chunk of the sequence, and global ones that know no positions.

Chunked layers rotate neighbouring pairs and may norm queries and keys; in global layers queries grow slowly with
their position, so that attention stays sharp over long contexts (Nakanishi, 2025). Some or all layers have a
mixture of experts and a shared MLP instead of an MLP.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jpaged.model_api import BuildContext

from .attention import Attention, Heads
from .config_reader import ConfigReader, Fields, Rope, dense
from .decoder import Decoder, check_model_type
from .experts import ExpertMLPs, SparseMLP, SparseNames
from .groups import kinds_from_types, layer_groups
from .layers import GatedMLP, RMSNorm, check_activation
from .linear import LiveRows
from .mixture import ExpertLayout
from .pre_norm import LayerNames, PreNormLayer
from .rope import rotary_from_config
from .routing import Router, Routing
from .stack import LayerKind, Shared

_NAMES = SparseNames("router", shared="shared_expert", separate=None)


def _layer(config: Any, kind: LayerKind, heads: Heads, layout: ExpertLayout, build: BuildContext) -> PreNormLayer:
    """Return a layer, whose MLP is one for all tokens, in most layers together with experts."""
    size, eps = config.hidden_size, config.rms_norm_eps
    activation = check_activation(config.hidden_act, "hidden_act")
    qk_norm = partial(RMSNorm, heads.head_dim, eps, build, affine=False)
    attention = Attention(
        size,
        heads,
        build,
        scale=heads.head_dim**-0.5,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        qk_norm=qk_norm if config.use_qk_norm and kind.group == "chunk" else None,
    )
    mixed = kind.variant == "experts"
    width = config.intermediate_size if mixed else config.intermediate_size_mlp
    plain = GatedMLP(size, width, activation, build, bias=False)
    mlp: GatedMLP | SparseMLP = plain
    if mixed:
        router = Router(size, layout.experts, Routing(config.num_experts_per_tok, "sigmoid"), build)
        experts = ExpertMLPs(size, width, activation, build, layout=layout, weighs_inputs=True)
        mlp = SparseMLP(router, experts, plain, _NAMES)
    return PreNormLayer(size, eps, attention, mlp, build, names=LayerNames(mlp="feed_forward"))


def _follow(fields: Fields) -> None:
    """Set which layers rotate, which have experts, and which see chunks only: those that rotate."""
    layers, period, step = (
        fields[name] for name in ("num_hidden_layers", "no_rope_layer_interval", "interleave_moe_layer_step")
    )
    if not fields["no_rope_layers"]:
        fields["no_rope_layers"] = [int((number + 1) % period != 0) for number in range(layers)]
    if fields["moe_layers"] is None:
        fields["moe_layers"] = list(range(step - 1, layers, step))
    if fields["layer_types"] is None:
        chunks = fields["attention_chunk_size"] is not None
        fields["layer_types"] = [
            "chunked_attention" if rotates and chunks else "full_attention" for rotates in fields["no_rope_layers"]
        ]


_CONFIGS = {
    "llama4_text": ConfigReader(
        dense(
            vocab_size=202048,
            hidden_size=5120,
            intermediate_size=8192,
            intermediate_size_mlp=16384,
            num_hidden_layers=48,
            num_attention_heads=40,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=131072,
            rms_norm_eps=1e-05,
            num_experts_per_tok=1,
            num_local_experts=16,
            moe_layers=None,
            interleave_moe_layer_step=1,
            use_qk_norm=True,
            no_rope_layers=None,
            no_rope_layer_interval=4,
            attention_chunk_size=8192,
            layer_types=None,
            attn_temperature_tuning=True,
            floor_scale=8192,
            attn_scale=0.1,
            attention_bias=False,
        ),
        rope=Rope(500000.0),
        follow=_follow,
    ),
}
"""Reads the configs, by ``model_type``."""


class Llama4(Decoder):
    """`jpaged.model_api.CausalLM` for Llama 4's text model; `config` is a Hugging Face ``Llama4TextConfig``."""

    configs = _CONFIGS

    _has_experts = True

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("llama4_text",))
        heads = Heads.of(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            build,
            rotates_neighbours=True,
        )
        groups = kinds_from_types(config, local="chunked_attention")
        if [bool(rotates) for rotates in config.no_rope_layers] != [kind.group == "chunk" for kind in groups]:
            raise ValueError(
                f"no_rope_layers={config.no_rope_layers} is not supported with layer_types={config.layer_types}: "
                "chunked layers must rotate, the others must not"
            )
        mixed = ["experts" if number in config.moe_layers else "dense" for number in range(len(groups))]
        kinds = tuple(LayerKind(kind.group, variant) for kind, variant in zip(groups, mixed, strict=True))
        rotary = rotary_from_config(config, config.head_dim)
        if build.expert_parallel and not config.moe_layers:
            raise ValueError(f"enable_expert_parallel=True, but moe_layers={config.moe_layers}: there are no experts")
        layout = ExpertLayout(config.num_local_experts, build.tensor_parallel, build.expert_parallel)

        def make(kind: LayerKind, build: BuildContext) -> PreNormLayer:
            return _layer(config, kind, heads, layout, build)

        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=layer_groups(
                kinds,
                heads.layout.kv_heads,
                config.head_dim,
                attention_chunk_size=config.attention_chunk_size,
                q_per_kv=heads.layout.q_per_kv,
            ),
            rotary={"chunk": rotary, "full": None},
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps, build),
        )
        self.growth = (config.floor_scale, config.attn_scale) if config.attn_temperature_tuning else None

    def shared(self, positions: Int[Array, " tokens"], live_rows: LiveRows) -> Shared:
        shared = super().shared(positions, live_rows)
        if self.growth is None:
            return shared
        every, strength = self.growth
        steps = jnp.floor((positions.astype(jnp.float32) + 1) / every)
        return replace(shared, growth={"full": 1 + strength * jnp.log1p(steps)})
