"""Describes the decoders that differ from Llama by a few switches, dense or with experts: one row a family.

A row reads the family's Hugging Face config. Everything it leaves out is Llama's, see `DecoderSpec`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jpaged.model_api import AttentionGroup, BuildContext

from .attention import ProjectionNames
from .dense import DecoderSpec, DenseDecoder, DenseParts, MLPSpec, NormNames, QKNorm
from .experts import ExpertsSpec, SparseNames
from .family_configs import CONFIGS
from .groups import kinds_from_types
from .mtp import HeadNames, PredictionHead
from .rope import query_growth
from .routing import Routing, sigmoid_routing
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


def _granite(config: Any, *, mlp_bias: bool | None = None) -> DecoderSpec:
    """Granite 3 (IBM, 2024): four multipliers."""
    return DecoderSpec(
        _mlp(config, bias=config.mlp_bias if mlp_bias is None else mlp_bias),
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
        embed_factor=config.hidden_size**0.5,
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
        qkv_bias=getattr(config, "attention_bias", True),
        rotates_neighbours=True,
        partial_rotary=True,
    )


def _glm(config: Any) -> DecoderSpec:
    """GLM-4 9B (Z.ai, 2024): GLM-4 with Llama's norms."""
    return replace(_glm4(config), norms=NormNames())


def _glm4v_text(config: Any) -> DecoderSpec:
    """GLM-4.1V's text model (Z.ai, 2025): GLM-4, see `_qwen2_vl_text`."""
    return _glm4(config)


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


def _paddleocr_vl_text(config: Any) -> DecoderSpec:
    """PaddleOCR-VL's text model (Baidu, 2025): ERNIE 4.5 that rotates halves, see `_qwen2_vl_text`."""
    return replace(_ernie4_5(config), rotates_neighbours=False)


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
    return DecoderSpec(_mlp(config), config.rms_norm_eps, _alike(config), growth=query_growth(config.rope_parameters))


def _arcee(config: Any) -> DecoderSpec:
    """AFM (Arcee AI, 2025): Llama with an MLP without gates."""
    return DecoderSpec(
        _mlp(config, bias=config.mlp_bias, gated=False, names=("up_proj", "down_proj")),
        config.rms_norm_eps,
        _alike(config),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )


def _nemotron(config: Any) -> DecoderSpec:
    """Nemotron-4 and Minitron (NVIDIA, 2024): LayerNorms that keep their scale's distance from one; half is rotated."""
    return DecoderSpec(
        _mlp(config, bias=config.mlp_bias, gated=False, names=("up_proj", "down_proj")),
        config.norm_eps,
        _alike(config),
        norm="layer",
        norm_offset=1.0,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        partial_rotary=True,
    )


def _cwm(config: Any) -> DecoderSpec:
    """Code World Model (Meta, 2025): Llama with local layers."""
    return DecoderSpec(_mlp(config), config.rms_norm_eps, kinds_from_types(config))


def _qwen2_vl_text(config: Any) -> DecoderSpec:
    """The text models of Qwen2-VL and Qwen2.5-VL (Qwen Team, 2024): Qwen2, for a token of text has the same position
    in all three axes of its rotation."""
    return DecoderSpec(_mlp(config), config.rms_norm_eps, kinds_from_types(config), qkv_bias=True)


def _qwen3_vl_text(config: Any) -> DecoderSpec:
    """Qwen3-VL's text model (Qwen Team, 2025): Qwen3, see `_qwen2_vl_text`."""
    return DecoderSpec(
        _mlp(config),
        config.rms_norm_eps,
        _alike(config),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        qk_norm=QKNorm("rms"),
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


def _with_experts(kinds: tuple[LayerKind, ...], has_experts: Callable[[int], bool] = lambda _: True):
    """Return the kinds of layers, those marked that have experts, by their numbers."""
    return tuple(replace(kind, variant="experts") if has_experts(n) else kind for n, kind in enumerate(kinds))


def _qwen2_moe(config: Any) -> DecoderSpec:
    """Qwen1.5-MoE and Qwen2-MoE (Qwen Team, 2024): experts, and a shared one that a token's gate weighs."""
    every, plain = config.decoder_sparse_step, config.mlp_only_layers
    kinds = kinds_from_types(config) if config.use_sliding_window else (LayerKind("full"),) * config.num_hidden_layers
    return DecoderSpec(
        _mlp(config),
        config.rms_norm_eps,
        _with_experts(kinds, lambda n: n not in plain and config.num_experts > 0 and (n + 1) % every == 0),
        ExpertsSpec(
            config.num_experts,
            config.moe_intermediate_size,
            Routing(config.num_experts_per_tok, sums_to_one=config.norm_topk_prob),
            shared_width=config.shared_expert_intermediate_size,
            shared_gated=True,
            names=SparseNames(shared="shared_expert"),
        ),
        qkv_bias=config.qkv_bias,
    )


def _qwen3_vl_moe_text(config: Any) -> DecoderSpec:
    """The text model of Qwen3-VL with experts (Qwen Team, 2025): Qwen3-MoE, see `_qwen2_vl_text`."""
    every, plain = config.decoder_sparse_step, config.mlp_only_layers
    return replace(
        _qwen3_vl_text(config),
        kinds=_with_experts(_alike(config), lambda n: n not in plain and (n + 1) % every == 0),
        experts=ExpertsSpec(
            config.num_experts,
            config.moe_intermediate_size,
            Routing(config.num_experts_per_tok, sums_to_one=True, added_to_sum=0.0),
        ),
    )


def _olmoe(config: Any) -> DecoderSpec:
    """OLMoE (Muennighoff et al., 2024): norms of all heads together, and experts in every layer."""
    if config.clip_qkv is not None:
        raise ValueError(f"clip_qkv={config.clip_qkv} is not supported; only None")
    return DecoderSpec(
        _mlp(config),
        config.rms_norm_eps,
        _with_experts(_alike(config)),
        ExpertsSpec(
            config.num_experts,
            config.intermediate_size,
            Routing(config.num_experts_per_tok, sums_to_one=config.norm_topk_prob),
        ),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        qk_norm=QKNorm("rms_all"),
    )


def _deepseek_experts(config: Any) -> ExpertsSpec:
    """Return experts as DeepSeek-V3's, by its fields of the config."""
    return ExpertsSpec(
        config.n_routed_experts,
        config.moe_intermediate_size,
        sigmoid_routing(config),
        corrected=True,
        shared_width=config.moe_intermediate_size * config.n_shared_experts,
    )


def _glm4_moe(config: Any) -> DecoderSpec:
    """GLM-4.5 to 4.7, and GLM-4.5V's text model (Z.ai, 2025): DeepSeek-V3's experts, half a head is rotated, queries
    may be normed."""
    return DecoderSpec(
        _mlp(config),
        config.rms_norm_eps,
        _with_experts(_alike(config), lambda n: n >= config.first_k_dense_replace),
        _deepseek_experts(config),
        qkv_bias=config.attention_bias,
        qk_norm=QKNorm("rms") if getattr(config, "use_qk_norm", False) else None,
        partial_rotary=True,
    )


def _dots1(config: Any) -> DecoderSpec:
    """dots.llm1 (rednote, 2025): Qwen3's attention and DeepSeek-V3's experts."""
    return DecoderSpec(
        _mlp(config),
        config.rms_norm_eps,
        _with_experts(kinds_from_types(config), lambda n: n >= config.first_k_dense_replace),
        _deepseek_experts(config),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        qk_norm=QKNorm("rms"),
    )


def _minimax_m2(config: Any) -> DecoderSpec:
    """MiniMax-M2 (MiniMax, 2025): sigmoid scores, norms of all heads together, half a head is rotated."""
    return DecoderSpec(
        _mlp(config),
        config.rms_norm_eps,
        _with_experts((LayerKind("full"),) * config.num_hidden_layers),
        ExpertsSpec(
            config.num_local_experts,
            config.intermediate_size,
            Routing(config.num_experts_per_tok, "sigmoid", sums_to_one=True, added_to_sum=0.0),
            corrected=True,
            names=SparseNames(correction="e_score_correction_bias"),
        ),
        qk_norm=QKNorm("rms_all"),
        partial_rotary=True,
    )


def _ernie4_5_moe(config: Any) -> DecoderSpec:
    """ERNIE 4.5 with experts (Baidu, 2025): softmax scores, corrected by a bias to choose."""
    first, last, every = config.moe_layer_start_index, config.moe_layer_end_index, config.moe_layer_interval
    bias = bool(config.use_bias)
    return replace(
        _ernie4_5(config),
        kinds=_with_experts(_alike(config), lambda n: first <= n <= last and (n + 1) % every == 0),
        experts=ExpertsSpec(
            config.moe_num_experts,
            config.moe_intermediate_size,
            Routing(config.moe_k, sums_to_one=True, added_to_sum=0.0, least_sum=config.moe_norm_min),
            corrected=True,
            shared_width=config.moe_intermediate_size * config.moe_num_shared_experts,
            shared_bias=bias,
            names=SparseNames(correction="moe_statics.e_score_correction_bias"),
        ),
        head_bias=bias,
    )


def _granitemoe(config: Any) -> DecoderSpec:
    """Granite 3 with experts (IBM, 2024): four multipliers, and softmax over a token's experts."""
    return replace(
        _granite(config, mlp_bias=False),
        kinds=_with_experts(_alike(config)),
        experts=ExpertsSpec(
            config.num_local_experts,
            config.intermediate_size,
            Routing(config.num_experts_per_tok, sums_to_one=True),
            names=SparseNames(router="router"),
        ),
    )


def _hunyuan_v1_moe(config: Any) -> DecoderSpec:
    """Hunyuan-A13B (Tencent, 2025): Hunyuan's attention, and experts next to a shared one."""
    per_token = config.moe_topk if isinstance(config.moe_topk, list) else [config.moe_topk]
    counts = config.num_experts if isinstance(config.num_experts, list) else [config.num_experts]
    for name, numbers in (("moe_topk", per_token), ("num_experts", counts)):
        if len(set(numbers)) > 1:
            raise ValueError(f"{name}={str(numbers)[:80]} differs between layers, which is not supported")
    return replace(
        _hunyuan_v1_dense(config),
        kinds=_with_experts(_alike(config)),
        experts=ExpertsSpec(
            counts[0],
            config.intermediate_size,
            Routing(per_token[0], sums_to_one=True, added_to_sum=0.0),
            shared_width=config.intermediate_size,
            names=SparseNames(router="gate.wg", shared="shared_mlp"),
        ),
    )


FAMILIES: dict[str, Callable[[Any], DecoderSpec]] = {
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "gemma": _gemma,
    "smollm3": _smollm3,
    "glm": _glm,
    "glm4": _glm4,
    "glm4v_text": _glm4v_text,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie4_5,
    "paddleocr_vl_text": _paddleocr_vl_text,
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
    "arcee": _arcee,
    "nemotron": _nemotron,
    "cwm": _cwm,
    "qwen2_vl_text": _qwen2_vl_text,
    "qwen2_5_vl_text": _qwen2_vl_text,
    "qwen3_vl_text": _qwen3_vl_text,
    "qwen3_vl_moe_text": _qwen3_vl_moe_text,
    "qwen2_moe": _qwen2_moe,
    "olmoe": _olmoe,
    "glm4_moe": _glm4_moe,
    "glm4v_moe_text": _glm4_moe,
    "dots1": _dots1,
    "minimax_m2": _minimax_m2,
    "ernie4_5_moe": _ernie4_5_moe,
    "granitemoe": _granitemoe,
    "hunyuan_v1_moe": _hunyuan_v1_moe,
}
"""Each family's row, by the ``model_type`` of its config."""


class Family(DenseDecoder):
    """`jpaged.model_api.CausalLM` for the families in `FAMILIES`; `config` is their Hugging Face config."""

    configs = CONFIGS

    def __init__(self, config: Any, build: BuildContext):
        if config.model_type not in FAMILIES:
            raise ValueError(f"model_type={config.model_type!r} is not one of {', '.join(FAMILIES)}")
        super().__init__(config, build, FAMILIES[config.model_type](config))

    @staticmethod
    def draft_head(config: Any, build: BuildContext) -> PredictionHead:
        """See `jpaged.model_api.HasDraftHead`; GLM-4.5 to 4.7 have one."""
        if config.model_type != "glm4_moe":
            raise ValueError(f"models of model_type={config.model_type!r} have no head that predicts further tokens")
        parts = DenseParts.of(config, build, _glm4_moe(config))
        layout, rotary = parts.heads.layout, parts.rotary("full")
        assert rotary is not None
        return PredictionHead(
            config,
            build,
            parts.make,
            memory=AttentionGroup("full", (0,), layout.kv_heads, parts.heads.head_dim, q_per_kv=layout.q_per_kv),
            variant="experts",
            rotary=rotary,
            names=HeadNames.of_further_layer(config),
        )
