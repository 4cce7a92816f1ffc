"""Describes the dense decoders that differ from Llama by a few switches: one row a family.

A row reads the family's Hugging Face config. Everything it leaves out is Llama's, see `DecoderSpec`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jpaged.model_api import BuildContext

from .attention import ProjectionNames
from .dense import DecoderSpec, DenseDecoder, MLPSpec, NormNames, QKNorm
from .family_configs import CONFIGS
from .groups import kinds_from_types
from .stack import LayerKind

_POST = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_FUSED_MLP = ("gate_up_proj", "down_proj")


def _alike(config: Any) -> tuple[LayerKind, ...]:
    """Return kinds of layers that all see the same: a window where the config has one, else everything."""
    group = "full" if getattr(config, "sliding_window", None) is None else "window"
    return (LayerKind(group),) * config.num_hidden_layers


def _mlp(config: Any, **changes: Any) -> MLPSpec:
    return MLPSpec(config.intermediate_size, config.hidden_act, **changes)


def _phi3(config: Any) -> DecoderSpec:
    """Phi-3 and Phi-4 (Microsoft, 2024): fused projections; a part of a head is rotated, longrope stretches it."""
    return DecoderSpec(
        _mlp(config, names=_FUSED_MLP),
        config.rms_norm_eps,
        _alike(config),
        projections=ProjectionNames(qkv=("qkv_proj",)),
        partial_rotary=True,
    )


def _granite(config: Any) -> DecoderSpec:
    """Granite 3 (IBM, 2024): four multipliers."""
    return DecoderSpec(
        _mlp(config, bias=config.mlp_bias),
        config.rms_norm_eps,
        _alike(config),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        scale=config.attention_multiplier,
        embed_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1 / config.logits_scaling,
    )


def _olmo2(config: Any) -> DecoderSpec:
    """OLMo 2 (Allen Institute for AI, 2024): norms after each block, and of all heads together."""
    return DecoderSpec(
        _mlp(config),
        config.rms_norm_eps,
        _alike(config),
        norms=_POST,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        qk_norm=QKNorm("rms_all"),
    )


def _gemma(config: Any) -> DecoderSpec:
    """Gemma (Gemma Team, 2024): norms keep their scale's distance from one, the embedding is scaled."""
    if config.use_bidirectional_attention:
        raise ValueError("use_bidirectional_attention=True is not supported: attention is causal")
    return DecoderSpec(
        _mlp(config),
        config.rms_norm_eps,
        _alike(config),
        norm_offset=1.0,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        embed_scale=config.hidden_size**0.5,
    )


def _smollm3(config: Any) -> DecoderSpec:
    """SmolLM3 (Hugging Face, 2025): some layers rotate nothing."""
    kinds = kinds_from_types(config) if config.use_sliding_window else (LayerKind("full"),) * config.num_hidden_layers
    rotates = config.no_rope_layers  # transformers' name for 1 where a layer rotates
    return DecoderSpec(
        _mlp(config, bias=config.mlp_bias),
        config.rms_norm_eps,
        tuple(kind if turns else replace(kind, variant="still") for kind, turns in zip(kinds, rotates, strict=True)),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )


def _glm4(config: Any) -> DecoderSpec:
    """GLM-4 (Z.ai, 2025): norms before and after each block; neighbours of half a head are rotated."""
    norms = NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return DecoderSpec(
        _mlp(config, names=_FUSED_MLP),
        config.rms_norm_eps,
        _alike(config),
        norms=norms,
        qkv_bias=config.attention_bias,
        rotates_neighbours=True,
        partial_rotary=True,
    )


def _seed_oss(config: Any) -> DecoderSpec:
    """Seed-OSS (ByteDance, 2025): Llama with biases of its own choice."""
    return DecoderSpec(
        _mlp(config, bias=config.mlp_bias),
        config.rms_norm_eps,
        _alike(config),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_out_bias,
    )


def _ernie4_5(config: Any) -> DecoderSpec:
    """ERNIE 4.5 (Baidu, 2025): neighbours are rotated."""
    bias = bool(config.use_bias)
    return DecoderSpec(
        _mlp(config, bias=bias),
        config.rms_norm_eps,
        _alike(config),
        qkv_bias=bias,
        out_bias=bias,
        rotates_neighbours=True,
    )


def _starcoder2(config: Any) -> DecoderSpec:
    """StarCoder 2 (Lozhkov et al., 2024): LayerNorms, an MLP without gates, a window for all layers."""
    return DecoderSpec(
        _mlp(config, bias=config.use_bias, gated=False, names=("c_fc", "c_proj")),
        config.norm_epsilon,
        _alike(config),
        norm="layer",
        qkv_bias=config.use_bias,
        out_bias=config.use_bias,
    )


def _gpt_neox(config: Any) -> DecoderSpec:
    """GPT-NeoX and Pythia (Black et al., 2022): attention and MLP side by side; Q, K and V of each head in turn."""
    return DecoderSpec(
        _mlp(config, bias=True, gated=False, names=("dense_h_to_4h", "dense_4h_to_h")),
        config.layer_norm_eps,
        _alike(config),
        norm="layer",
        parallel=config.use_parallel_residual,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        attention="attention",
        projections=ProjectionNames(qkv=("query_key_value",), out="dense", by_head=True),
        partial_rotary=True,
        prefix="gpt_neox",
        embed_name="embed_in",
        norm_name="final_layer_norm",
        head_name="embed_out",
    )


def _stablelm(config: Any) -> DecoderSpec:
    """StableLM 2 (Stability AI, 2024): LayerNorms, a quarter of a head is rotated."""
    parallel = config.use_parallel_residual
    names = ("q_layernorm.norms.{head}", "k_layernorm.norms.{head}")
    return DecoderSpec(
        _mlp(config),
        config.layer_norm_eps,
        _alike(config),
        norm="layer",
        norms=NormNames(before_mlp=None) if parallel else NormNames(),
        parallel=parallel,
        qkv_bias=config.use_qkv_bias,
        qk_norm=QKNorm("layer_each", names) if config.qk_layernorm else None,
        partial_rotary=True,
    )


def _phi(config: Any) -> DecoderSpec:
    """Phi-1.5 and Phi-2 (Li et al., 2023): one LayerNorm for attention and MLP side by side, biases everywhere."""
    return DecoderSpec(
        _mlp(config, bias=True, gated=False, names=("fc1", "fc2")),
        config.layer_norm_eps,
        _alike(config),
        norm="layer",
        norms=NormNames(before_mlp=None),
        parallel=True,
        qkv_bias=True,
        out_bias=True,
        qk_norm=QKNorm("layer", ("q_layernorm", "k_layernorm")) if config.qk_layernorm else None,
        projections=ProjectionNames(out="dense"),
        partial_rotary=True,
        head_bias=True,
        norm_name="final_layernorm",
    )


def _cohere(config: Any) -> DecoderSpec:
    """Command R (Cohere, 2024): one LayerNorm without bias for attention and MLP side by side, logits are scaled."""
    return DecoderSpec(
        _mlp(config),
        config.layer_norm_eps,
        _alike(config),
        norm="layer",
        norm_bias=False,
        norms=NormNames(before_mlp=None),
        parallel=True,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        qk_norm=QKNorm("layer_each") if getattr(config, "use_qk_norm", False) else None,
        rotates_neighbours=True,
        logit_scale=config.logit_scale,
    )


def _hunyuan_v1_dense(config: Any) -> DecoderSpec:
    """Hunyuan (Tencent, 2025): queries and keys are normed after the rotation."""
    return DecoderSpec(
        _mlp(config),
        config.rms_norm_eps,
        _alike(config),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        qk_norm=QKNorm("rms", ("query_layernorm", "key_layernorm"), after_rotation=True),
    )


def _exaone4(config: Any) -> DecoderSpec:
    """EXAONE 4 (LG AI Research, 2025): norms after each block; with local layers, global ones know no positions."""
    return DecoderSpec(
        _mlp(config),
        config.rms_norm_eps,
        kinds_from_types(config),
        norms=_POST,
        qk_norm=QKNorm("rms"),
        still_groups=() if config.sliding_window is None else ("full",),
    )


def _ministral3(config: Any) -> DecoderSpec:
    """Ministral 3 (Mistral AI, 2025): Mistral with queries that grow with their position."""
    rope = config.rope_parameters
    beta = rope.get("llama_4_scaling_beta")
    return DecoderSpec(
        _mlp(config),
        config.rms_norm_eps,
        _alike(config),
        growth=None if not beta else (beta, rope["original_max_position_embeddings"]),
    )


def _apertus(config: Any) -> DecoderSpec:
    """Apertus (Swiss AI, 2025): an MLP without gates whose activation has numbers of its own; queries are normed."""
    return DecoderSpec(
        _mlp(config, gated=False, names=("up_proj", "down_proj")),
        config.rms_norm_eps,
        _alike(config),
        norms=NormNames("attention_layernorm", None, "feedforward_layernorm", None),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        qk_norm=QKNorm("rms"),
    )


def _olmo3(config: Any) -> DecoderSpec:
    """OLMo 3 (Allen Institute for AI, 2025): OLMo 2 with local layers, which rotate by frequencies of their own."""
    return replace(_olmo2(config), kinds=kinds_from_types(config), rotary_by_type=True)


_COHERE2 = {"use_parallel_block": True, "use_gated_activation": True, "use_qk_norm": False, "rotary_pct": 1.0}
"""Fields that published configs carry and transformers does not read: the values it takes for granted."""


def _cohere2(config: Any) -> DecoderSpec:
    """Command R7B and Command A (Cohere, 2025): global layers among local ones know no positions."""
    for name, value in _COHERE2.items():
        if getattr(config, name, value) != value:
            raise ValueError(f"{name}={getattr(config, name)} is not supported; only {value}")
    return replace(_cohere(config), kinds=kinds_from_types(config), still_groups=("full",))


FAMILIES: dict[str, Callable[[Any], DecoderSpec]] = {
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "gemma": _gemma,
    "smollm3": _smollm3,
    "glm4": _glm4,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie4_5,
    "starcoder2": _starcoder2,
    "gpt_neox": _gpt_neox,
    "stablelm": _stablelm,
    "phi": _phi,
    "apertus": _apertus,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "hunyuan_v1_dense": _hunyuan_v1_dense,
    "exaone4": _exaone4,
    "ministral3": _ministral3,
}
"""Each family's row, by the ``model_type`` of its config."""


class Family(DenseDecoder):
    """`jpaged.model_api.CausalLM` for the families in `FAMILIES`; `config` is their Hugging Face config."""

    configs = CONFIGS

    def __init__(self, config: Any, build: BuildContext):
        if config.model_type not in FAMILIES:
            raise ValueError(f"model_type={config.model_type!r} is not one of {', '.join(FAMILIES)}")
        super().__init__(config, build, FAMILIES[config.model_type](config))
