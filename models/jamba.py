"""Jamba (AI21, 2024): seven layers of Mamba to one of attention without positions; every other MLP has experts."""

from __future__ import annotations

from typing import Any

from jpaged.model_api import BuildContext

from .attention import Attention, Heads
from .config_reader import ConfigReader, Fields, dense
from .decoder import Decoder, check_model_type
from .experts import ExpertMLPs, SparseMLP, SparseNames
from .groups import kinds_from_types, layer_groups, state_groups
from .layers import GatedMLP, RMSNorm, check_activation
from .mixture import ExpertLayout
from .pre_norm import LayerNames, PreNormLayer
from .recurrent.convolution import check_silu
from .recurrent.mamba1 import Mamba1, Mamba1Sizes
from .routing import Router, Routing
from .stack import LayerKind

_NAMES = {
    group: LayerNames("input_layernorm", mixer, "pre_ff_layernorm", "feed_forward")
    for group, mixer in (("full", "self_attn"), ("state", "mamba"))
}


def _follow(fields: Fields) -> None:
    """Set which layers attend and which have experts, and the rank of the steps' sizes.

    Raises:
        ValueError: an offset is not below its period.
    """
    for kind in ("attn", "expert"):
        period, offset = fields[f"{kind}_layer_period"], fields[f"{kind}_layer_offset"]
        if offset >= period:
            raise ValueError(f"{kind}_layer_offset={offset} is not below {kind}_layer_period={period}")
    layers = range(fields["num_hidden_layers"])

    def hit(kind: str, number: int) -> bool:
        return number % fields[f"{kind}_layer_period"] == fields[f"{kind}_layer_offset"]

    fields["layer_types"] = ["full_attention" if hit("attn", number) else "linear_attention" for number in layers]
    fields["layers_num_experts"] = [fields["num_experts"] if hit("expert", number) else 1 for number in layers]
    if fields["mamba_dt_rank"] == "auto":
        fields["mamba_dt_rank"] = -(-fields["hidden_size"] // 16)


_CONFIGS = {
    "jamba": ConfigReader(
        dense(
            vocab_size=65536,
            intermediate_size=14336,
            num_key_value_heads=8,
            rms_norm_eps=1e-06,
            pad_token_id=0,
            max_position_embeddings=262144,
            num_experts_per_tok=2,
            num_experts=16,
            expert_layer_period=2,
            expert_layer_offset=1,
            attn_layer_period=8,
            attn_layer_offset=4,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_dt_rank="auto",
            mamba_conv_bias=True,
            mamba_proj_bias=False,
        ),
        rope=None,
        follow=_follow,
        same=(("num_local_experts", "num_experts"),),
    ),
}
"""Reads the configs, by ``model_type``."""


class Jamba(Decoder):
    """`jpaged.model_api.CausalLM` for Jamba; `config` is a Hugging Face ``JambaConfig``."""

    configs = _CONFIGS

    _norm_name = "final_layernorm"
    _has_experts = True

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("jamba",))
        check_silu(config.hidden_act)
        size, eps = config.hidden_size, config.rms_norm_eps
        activation = check_activation(config.hidden_act, "hidden_act")
        heads = Heads.of_config(config, build)
        sizes = Mamba1Sizes(
            embed=size,
            inner=config.mamba_expand * size,
            state=config.mamba_d_state,
            rank=config.mamba_dt_rank,
            conv_width=config.mamba_d_conv,
            conv_bias=config.mamba_conv_bias,
            proj_bias=config.mamba_proj_bias,
            eps=eps,
        )
        variants = ["experts" if experts > 1 else None for experts in config.layers_num_experts]
        groups = kinds_from_types(config, local="linear_attention")
        kinds = tuple(LayerKind(kind.group, variant) for kind, variant in zip(groups, variants, strict=True))
        if build.expert_parallel and "experts" not in variants:
            raise ValueError(f"enable_expert_parallel=True, but num_experts={config.num_experts}: no layer has experts")

        def mixer(kind: LayerKind, build: BuildContext) -> Attention | Mamba1:
            if kind.group == "state":
                return Mamba1(sizes, build)
            return Attention(size, heads, build, scale=heads.head_dim**-0.5)

        def mlp(kind: LayerKind, build: BuildContext) -> GatedMLP | SparseMLP:
            if kind.variant == "experts":
                layout = ExpertLayout(config.num_experts, build.tensor_parallel, build.expert_parallel)
                router = Router(size, config.num_experts, Routing(config.num_experts_per_tok), build)
                experts = ExpertMLPs(size, config.intermediate_size, activation, build, layout=layout)
                return SparseMLP(router, experts, names=SparseNames(router="router"))
            return GatedMLP(size, config.intermediate_size, activation, build, bias=False)

        def make(kind: LayerKind, build: BuildContext) -> PreNormLayer:
            assert kind.group is not None
            return PreNormLayer(size, eps, mixer(kind, build), mlp(kind, build), build, names=_NAMES[kind.group])

        attention = layer_groups(kinds, heads.layout.kv_heads, heads.head_dim, q_per_kv=heads.layout.q_per_kv)
        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=(*attention, *state_groups(kinds, sizes.state_parts(build))),
            rotary={group.name: None for group in attention},
            norm=RMSNorm(size, eps, build),
        )
