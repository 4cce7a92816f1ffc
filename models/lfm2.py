"""LFM2 (Liquid AI, 2025): short convolutions, and a few layers of attention with normed queries and keys.

LFM2-MoE has experts in all but its first layers, chosen by corrected sigmoid scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from jpaged.model_api import BuildContext, WeightSource

from .attention import Attention, Heads
from .config_reader import ConfigReader, Fields, Rope
from .decoder import Decoder, check_model_type
from .experts import ExpertsSpec, SparseMLP, SparseNames
from .groups import kinds_from_types, layer_groups, state_groups
from .layers import GatedMLP, RMSNorm
from .pre_norm import LayerNames, PreNormLayer
from .recurrent.short_conv import ShortConv
from .rope import rotary_from_config
from .routing import Routing
from .stack import LayerKind

_NAMES = {
    group: LayerNames("operator_norm", mixer, "ffn_norm", "feed_forward")
    for group, mixer in (("full", "self_attn"), ("state", "conv"))
}


class LFM2Attention(Attention):
    """`Attention` under the names of LFM2's checkpoints."""

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:  # type: ignore[override]
        norms = ("q_layernorm", "k_layernorm")
        yield from super().weights(path, name, layer, out_name="out_proj", norm_names=norms)


class LFM2MLP(GatedMLP):
    """`GatedMLP` under the names of LFM2's checkpoints."""

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:  # type: ignore[override]
        yield from super().weights(path, name, layer, names=("w1", "w3", "w2"))


def _mlp_width(config: Any) -> int:
    """Return the width of the MLP, which configs say by the rule of Llama 1: two thirds, times a factor, rounded up."""
    width = config.intermediate_size
    if config.model_type == "lfm2_moe":
        return width
    if config.block_auto_adjust_ff_dim:
        width = 2 * width // 3
        if config.block_ffn_dim_multiplier is not None:
            width = int(config.block_ffn_dim_multiplier * width)
            width = -(-width // config.block_multiple_of) * config.block_multiple_of
    return width


def _follow(fields: Fields) -> None:
    """Take the fields' older names, and set which layers attend."""
    fields["tie_word_embeddings"] = fields.pop("tie_embedding", fields["tie_word_embeddings"])
    fields["intermediate_size"] = fields.pop("block_ff_dim", fields["intermediate_size"])
    if fields["layer_types"] is None:
        layers = range(fields["num_hidden_layers"])
        if fields["full_attn_idxs"] is None:
            fields["full_attn_idxs"] = list(layers)
        fields["layer_types"] = ["full_attention" if n in fields["full_attn_idxs"] else "conv" for n in layers]


_CONFIGS = {
    "lfm2": ConfigReader(
        {
            "vocab_size": 65536,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
            "norm_eps": 1e-05,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
            "full_attn_idxs": None,
            "layer_types": None,
        },
        rope=Rope(1000000.0),
        follow=_follow,
    ),
}
"""Reads the configs, by ``model_type``."""


def _experts(config: Any) -> ExpertsSpec:
    return ExpertsSpec(
        config.num_experts,
        config.moe_intermediate_size,
        Routing(
            config.num_experts_per_tok,
            "sigmoid",
            sums_to_one=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            added_to_sum=1e-6,
        ),
        corrected=config.use_expert_bias,
        names=SparseNames(correction="expert_bias"),
    )


class LFM2(Decoder):
    """`jpaged.model_api.CausalLM` for both; `config` is a Hugging Face ``Lfm2Config`` or ``Lfm2MoeConfig``."""

    configs = _CONFIGS

    _norm_name = "embedding_norm"
    reads_separate_experts = True
    """Reads each expert's tensors by names of their own; a checkpoint may hold those of all experts in one."""

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("lfm2", "lfm2_moe"))
        size, eps, width = config.hidden_size, config.norm_eps, config.conv_L_cache
        heads = Heads.of_config(config, build)
        kinds = kinds_from_types(config, local="conv")
        self._has_experts = config.model_type == "lfm2_moe"
        if self._has_experts:
            first = config.num_dense_layers
            kinds = tuple(replace(kind, variant="experts") if n >= first else kind for n, kind in enumerate(kinds))

        def mixer(kind: LayerKind, build: BuildContext) -> Attention | ShortConv:
            if kind.group == "state":
                return ShortConv(size, width, build, bias=config.conv_bias)
            norm = partial(RMSNorm, heads.head_dim, eps, build)
            return LFM2Attention(size, heads, build, scale=heads.head_dim**-0.5, qk_norm=norm)

        def make(kind: LayerKind, build: BuildContext) -> PreNormLayer:
            mlp: LFM2MLP | SparseMLP
            if kind.variant == "experts":
                mlp = _experts(config).make(size, "silu", build)
            else:
                mlp = LFM2MLP(size, _mlp_width(config), "silu", build, bias=False)
            assert kind.group is not None
            return PreNormLayer(size, eps, mixer(kind, build), mlp, build, names=_NAMES[kind.group])

        attention = layer_groups(kinds, heads.layout.kv_heads, heads.head_dim, q_per_kv=heads.layout.q_per_kv)
        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=(*attention, *state_groups(kinds, ShortConv.state_parts(size, width, build))),
            rotary={group.name: rotary_from_config(config, heads.head_dim) for group in attention},
            norm=RMSNorm(size, eps, build),
        )
