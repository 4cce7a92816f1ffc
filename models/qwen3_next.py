"""Qwen3-Next and the text of Qwen3.5 (Qwen Team, 2025 and 2026): three layers of Gated DeltaNet to one of attention.

Attention has a gate for each number of a head, norms queries and keys, and rotates a quarter of a head. Norms keep
their scale's distance from one. The MLPs of Qwen3-Next and Qwen3.5-MoE are experts and a shared one that a token's gate
weighs. Qwen3.5-MoE is published with all experts of a layer in one tensor, and in FP8 with a tensor for each.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from jpaged.model_api import AttentionGroup, BuildContext

from .attention import Attention, Heads
from .config_reader import ConfigReader, Fields, Rope, dense, every_nth
from .decoder import Decoder, check_model_type
from .experts import ExpertsSpec, SparseMLP, SparseNames
from .groups import kinds_from_types, layer_groups, state_groups
from .layers import GatedMLP, RMSNorm, check_activation
from .mtp import HeadNames, PredictionHead
from .pre_norm import LayerNames, PreNormLayer
from .recurrent.convolution import check_silu
from .recurrent.delta_net import DeltaSizes, GatedDeltaNet
from .recurrent.slots import Slots
from .rope import rotary_from_config
from .routing import Routing
from .stack import LayerKind, MakeLayer

_NAMES = {
    group: LayerNames("input_layernorm", mixer, "post_attention_layernorm", "mlp")
    for group, mixer in (("full", "self_attn"), ("state", "linear_attn"))
}


def _experts(config: Any) -> ExpertsSpec:
    """Return a layer's experts, and the MLP that all tokens share."""
    return ExpertsSpec(
        config.num_experts,
        config.moe_intermediate_size,
        # Qwen3.5 has no such field: its shares always sum to one.
        Routing(config.num_experts_per_tok, sums_to_one=getattr(config, "norm_topk_prob", True)),
        shared_width=config.shared_expert_intermediate_size,
        shared_gated=True,
        names=SparseNames(shared="shared_expert"),
    )


def _kinds(config: Any) -> tuple[LayerKind, ...]:
    """Return each layer's kind; its variant says whether its MLP has experts."""
    kinds = kinds_from_types(config, local="linear_attention")
    if config.model_type == "qwen3_5_text":
        return kinds
    if config.model_type == "qwen3_5_moe_text":
        return tuple(replace(kind, variant="experts") for kind in kinds)

    def is_mixed(number: int) -> bool:
        every = (number + 1) % config.decoder_sparse_step == 0
        return number not in config.mlp_only_layers and config.num_experts > 0 and every

    return tuple(replace(kind, variant="experts" if is_mixed(n) else None) for n, kind in enumerate(kinds))


def _fourth_attends(fields: Fields) -> None:
    every_nth(fields, "linear_attention", fields.get("full_attention_interval") or 4)
    if "mlp_only_layers" in fields and fields["mlp_only_layers"] is None:
        fields["mlp_only_layers"] = []


_LINEAR: Fields = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""Default sizes of the recurrent layers, which all three share."""

_CONFIGS = {
    "qwen3_next": ConfigReader(
        dense(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=48,
            num_attention_heads=16,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            rms_norm_eps=1e-06,
            attention_bias=False,
            head_dim=256,
            **_LINEAR,
            decoder_sparse_step=1,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_experts_per_tok=10,
            num_experts=512,
            norm_topk_prob=True,
            mlp_only_layers=None,
            layer_types=None,
            bos_token_id=None,
            eos_token_id=None,
        ),
        rope=Rope(rotated=0.25),
        follow=_fourth_attends,
    ),
    "qwen3_5_text": ConfigReader(
        dense(
            vocab_size=248320,
            intermediate_size=12288,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=32768,
            rms_norm_eps=1e-06,
            attention_bias=False,
            head_dim=256,
            **_LINEAR,
            layer_types=None,
            bos_token_id=None,
            eos_token_id=None,
        ),
        rope=Rope(rotated=0.25),
        follow=_fourth_attends,
    ),
    "qwen3_5_moe_text": ConfigReader(
        dense(
            vocab_size=248320,
            hidden_size=2048,
            num_hidden_layers=40,
            num_attention_heads=16,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            rms_norm_eps=1e-06,
            attention_bias=False,
            head_dim=256,
            **_LINEAR,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_experts_per_tok=8,
            num_experts=256,
            layer_types=None,
            bos_token_id=None,
            eos_token_id=None,
        ),
        rope=Rope(rotated=0.25),
        follow=_fourth_attends,
    ),
}
"""Reads the configs, by ``model_type``."""


def _heads(config: Any, build: BuildContext) -> Heads:
    return Heads.of_config(config, build)


def _delta_sizes(config: Any, build: BuildContext) -> DeltaSizes:
    values, keys = config.linear_num_value_heads, config.linear_num_key_heads
    said = "linear_num_value_heads and linear_num_key_heads"
    return DeltaSizes(
        embed=config.hidden_size,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        eps=config.rms_norm_eps,
        slots=Slots.of(values, keys, build.tensor_parallel, said),
        fused=config.model_type == "qwen3_next",
    )


def _maker(config: Any, heads: Heads, sizes: DeltaSizes) -> MakeLayer:
    """Return what builds a layer of the model, or of its head."""
    size, eps, head_dim = config.hidden_size, config.rms_norm_eps, config.head_dim
    activation = check_activation(config.hidden_act, "hidden_act")

    def mixer(kind: LayerKind, build: BuildContext) -> Attention | GatedDeltaNet:
        if kind.group == "state":
            return GatedDeltaNet(sizes, build)
        bias = config.attention_bias
        return Attention(
            size,
            heads,
            build,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=partial(RMSNorm, head_dim, eps, build, offset=1.0),
            gated=True,
        )

    def mlp(kind: LayerKind, build: BuildContext) -> GatedMLP | SparseMLP:
        if kind.variant == "experts":
            return _experts(config).make(size, activation, build)
        return GatedMLP(size, config.intermediate_size, activation, build, bias=False)

    def make(kind: LayerKind, build: BuildContext) -> PreNormLayer:
        assert kind.group is not None
        return PreNormLayer(
            size, eps, mixer(kind, build), mlp(kind, build), build, names=_NAMES[kind.group], norm_offset=1.0
        )

    return make


class Qwen3Next(Decoder):
    """`jpaged.model_api.CausalLM`; `config` is a Hugging Face ``Qwen3NextConfig``, ``Qwen3_5TextConfig`` or
    ``Qwen3_5MoeTextConfig``."""

    configs = _CONFIGS

    _has_experts = True
    reads_separate_experts = True
    """Reads each expert's tensors by names of their own; a checkpoint may hold those of all experts in one."""

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"))
        check_silu(config.hidden_act)
        heads = _heads(config, build)
        sizes = _delta_sizes(config, build)
        kinds = _kinds(config)
        if build.expert_parallel and not any(kind.variant == "experts" for kind in kinds):
            raise ValueError("enable_expert_parallel=True, but no layer has experts")
        layout, head_dim = heads.layout, config.head_dim
        attention = layer_groups(kinds, layout.kv_heads, head_dim, q_per_kv=layout.q_per_kv)
        super().__init__(
            config,
            build,
            kinds,
            _maker(config, heads, sizes),
            groups=(*attention, *state_groups(kinds, sizes.state_parts(build))),
            rotary={group.name: rotary_from_config(config, head_dim, partial=True) for group in attention},
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps, build, offset=1.0),
        )

    @staticmethod
    def draft_head(config: Any, build: BuildContext) -> PredictionHead:
        """See `jpaged.model_api.HasDraftHead`."""
        config = config.get_text_config()
        heads = _heads(config, build)
        layout = heads.layout
        return PredictionHead(
            config,
            build,
            _maker(config, heads, _delta_sizes(config, build)),
            memory=AttentionGroup("full", (0,), layout.kv_heads, config.head_dim, q_per_kv=layout.q_per_kv),
            variant=_kinds(config)[0].variant,
            rotary=rotary_from_config(config, config.head_dim, partial=True),
            names=HeadNames(),
            norm_offset=1.0,
        )
