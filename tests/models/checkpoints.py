"""Tiny random checkpoints of every family, made by transformers, at sizes chosen to be awkward."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from dense_families import DENSE_FAMILIES
from shared_kv_llama import SharedKVLlama
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeLiteConfig,
    GPT2Config,
    GptOssConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MinistralConfig,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo3Config,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

_SIZES = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 109,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _llama(**changes) -> LlamaConfig:
    return LlamaConfig(**{**_SIZES, "tie_word_embeddings": False, **changes})


def _rope(rope_type: str, **parameters) -> LlamaConfig:
    """Stretched from 32 tokens, so that a sequence of a test reaches past the original context."""
    return _llama(
        max_position_embeddings=128,
        rope_parameters={"rope_type": rope_type, "rope_theta": 10000.0, **parameters},
    )


def _opt(**changes) -> OPTConfig:
    sizes = {"vocab_size": 211, "hidden_size": 96, "ffn_dim": 109, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 6, "max_position_embeddings": 512, "pad_token_id": 1}
    return OPTConfig(**{**sizes, **heads, "bos_token_id": 2, "eos_token_id": 2, **changes})


_LLAMA3_ROPE = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_QWEN = {**_SIZES, "num_hidden_layers": 4}
_DEEPSEEK = {
    **{field: size for field, size in _SIZES.items() if field != "head_dim"},
    "num_key_value_heads": 6,
    "kv_lora_rank": 46,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 14,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 37,
    "routed_scaling_factor": 1.5,
}

_WITHOUT_HEAD_DIM = {field: size for field, size in _SIZES.items() if field not in ("head_dim", "num_hidden_layers")}
_QWEN_DELTA = {
    **_SIZES,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}

_FALCON_MULTIPLIERS = {
    "lm_head_multiplier": 0.8,
    "embedding_multiplier": 1.7,
    "mlp_multipliers": [0.9, 1.2],
    "key_multiplier": 0.6,
    "attention_out_multiplier": 1.3,
    "attention_in_multiplier": 0.7,
    "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7],
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.6,
}

CHECKPOINTS: dict[str, PretrainedConfig] = {
    "llama": _llama(),
    "llama-tied-biased": _llama(
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        head_dim=64,
        hidden_act="gelu_pytorch_tanh",
    ),
    "llama-rope-llama3": _rope("llama3", **_LLAMA3_ROPE),
    "llama-rope-linear": _rope("linear", factor=4.0),
    "llama-rope-yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=32),
    "smollm2": _llama(
        num_attention_heads=9, num_key_value_heads=3, hidden_size=288, head_dim=32, tie_word_embeddings=True
    ),
    "mistral": MistralConfig(**{**_SIZES, "head_dim": 128}, sliding_window=None),
    "mistral-window": MistralConfig(**_SIZES, sliding_window=7),
    "ministral": MinistralConfig(
        **{**_SIZES, "num_hidden_layers": 4, "head_dim": 128},
        sliding_window=7,
        layer_types=["full_attention", *["sliding_attention"] * 3],
    ),
    "qwen2": Qwen2Config(**{**_QWEN, "head_dim": 16}, tie_word_embeddings=True),
    "qwen2-window": Qwen2Config(
        **{**_QWEN, "head_dim": 16}, use_sliding_window=True, sliding_window=7, max_window_layers=2
    ),
    "qwen3": Qwen3Config(**{**_QWEN, "head_dim": 64}, tie_word_embeddings=True),
    "llama-shared-kv": _llama(num_hidden_layers=5, use_cla=True, cla_share_factor=3),
    "ministral-shared-kv": MinistralConfig(
        **{**_SIZES, "num_hidden_layers": 8},
        tie_word_embeddings=False,
        sliding_window=7,
        layer_types=[*["sliding_attention"] * 3, "full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        use_cla=True,
        cla_share_factor=2,
    ),
    "opt": _opt(),
    "opt-projected": _opt(do_layer_norm_before=False, word_embed_proj_dim=40),
    "opt-plain": _opt(
        enable_bias=False,
        layer_norm_elementwise_affine=False,
        activation_function="gelu",
        tie_word_embeddings=False,
    ),
    "gemma2": Gemma2Config(
        **{**_SIZES, "num_hidden_layers": 5},
        sliding_window=7,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": Gemma3TextConfig(
        **{**_SIZES, "num_hidden_layers": 8, "head_dim": 64},
        sliding_window=7,
        query_pre_attn_scalar=24,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        },
    ),
    "cohere2": Cohere2Config(
        **{**_SIZES, "num_hidden_layers": 5, "hidden_size": 288},
        sliding_window=7,
        logit_scale=0.9,
        attention_bias=True,
    ),
    "gpt_oss": GptOssConfig(
        **{**_SIZES, "num_hidden_layers": 5, "head_dim": 64},
        sliding_window=7,
        num_local_experts=5,
        num_experts_per_tok=2,
        swiglu_limit=1.5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama4": Llama4TextConfig(
        **{**_SIZES, "num_hidden_layers": 8, "head_dim": 64},
        intermediate_size_mlp=101,
        interleave_moe_layer_step=2,
        num_local_experts=5,
        num_experts_per_tok=2,
        attention_chunk_size=11,
        floor_scale=9,
    ),
    "jamba": JambaConfig(
        **_WITHOUT_HEAD_DIM,
        num_hidden_layers=6,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=3,
        expert_layer_offset=2,
        num_experts=4,
        num_experts_per_tok=3,
        mamba_d_state=6,
        mamba_d_conv=3,
        mamba_expand=1,
        mamba_dt_rank=5,
        mamba_proj_bias=True,
        tie_word_embeddings=False,
    ),
    "mamba2": Mamba2Config(
        **{field: _SIZES[field] for field in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
        hidden_size=54,
        num_hidden_layers=3,
        num_heads=9,
        head_dim=12,
        n_groups=3,
        state_size=9,
        conv_kernel=2,
        tie_word_embeddings=True,
    ),
    "bamba": BambaConfig(
        **{**_WITHOUT_HEAD_DIM, "num_attention_heads": 4},
        num_hidden_layers=4,
        attn_layer_indices=[1],
        mamba_n_heads=6,
        mamba_d_state=10,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        time_step_limit=(0.3, 1.5),
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
    "granite4": GraniteMoeHybridConfig(
        **_WITHOUT_HEAD_DIM,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        mamba_n_heads=6,
        mamba_d_state=10,
        mamba_n_groups=2,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        time_step_limit=(0.3, 1.5),
        attention_bias=True,
        num_local_experts=6,
        num_experts_per_tok=3,
        shared_intermediate_size=35,
        embedding_multiplier=1.7,
        logits_scaling=0.7,
        residual_multiplier=0.6,
        attention_multiplier=0.4,
        tie_word_embeddings=False,
    ),
    "granite4-dense": GraniteMoeHybridConfig(
        **_WITHOUT_HEAD_DIM,
        num_hidden_layers=3,
        layer_types=["full_attention"] * 3,
        mamba_n_heads=6,
        num_local_experts=0,
        position_embedding_type="rope",
        shared_intermediate_size=109,
        embedding_multiplier=1.7,
        logits_scaling=0.7,
        residual_multiplier=0.6,
        attention_multiplier=0.4,
        tie_word_embeddings=True,
    ),
    "nemotron_h": NemotronHConfig(
        **{field: size for field, size in _SIZES.items() if field != "num_hidden_layers"},
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
        mamba_num_heads=6,
        mamba_head_dim=12,
        ssm_state_size=10,
        n_groups=3,
        conv_kernel=3,
        use_conv_bias=False,
        use_bias=True,
        mlp_bias=True,
        time_step_min=0.3,
        layer_norm_epsilon=1e-4,
        n_routed_experts=6,
        n_group=3,
        topk_group=2,
        num_experts_per_tok=3,
        moe_intermediate_size=37,
        moe_shared_expert_intermediate_size=41,
        moe_latent_size=50,
        routed_scaling_factor=1.5,
    ),
    "falcon_h1": FalconH1Config(
        **{**_WITHOUT_HEAD_DIM, "num_attention_heads": 4},
        num_hidden_layers=3,
        mamba_d_ssm=72,
        mamba_n_heads=6,
        mamba_n_groups=2,
        mamba_d_state=10,
        mamba_d_conv=3,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        tie_word_embeddings=False,
        **_FALCON_MULTIPLIERS,
    ),
    "falcon_h1-norm-first": FalconH1Config(
        **{**_WITHOUT_HEAD_DIM, "num_attention_heads": 4},
        num_hidden_layers=2,
        mamba_d_ssm=None,
        mamba_expand=1,
        mamba_n_heads=6,
        mamba_n_groups=3,
        mamba_d_state=10,
        mamba_rms_norm=True,
        tie_word_embeddings=True,
    ),
    "falcon_h1-plain": FalconH1Config(
        **{**_WITHOUT_HEAD_DIM, "num_attention_heads": 4},
        num_hidden_layers=2,
        mamba_d_ssm=72,
        mamba_n_heads=6,
        mamba_d_state=10,
        mamba_conv_bias=False,
        mlp_bias=True,
        attention_bias=True,
        mamba_proj_bias=True,
        projectors_bias=True,
        time_step_limit=(0.3, 1.5),
        tie_word_embeddings=True,
    ),
    "gpt2": GPT2Config(
        vocab_size=211,
        n_embd=96,
        n_inner=109,
        n_layer=3,
        n_head=6,
        n_positions=512,
        layer_norm_epsilon=1e-4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "qwen3_next": Qwen3NextConfig(
        **_QWEN_DELTA,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=21,
        shared_expert_intermediate_size=35,
        mlp_only_layers=[1],
    ),
    "qwen3_5": Qwen3_5TextConfig(**_QWEN_DELTA, tie_word_embeddings=True),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(
        **{field: size for field, size in _QWEN_DELTA.items() if field != "intermediate_size"},
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=21,
        shared_expert_intermediate_size=35,
    ),
    "lfm2": Lfm2Config(
        **_WITHOUT_HEAD_DIM,
        num_hidden_layers=5,
        full_attn_idxs=[1, 4],
        conv_bias=True,
        block_multiple_of=32,
    ),
    "lfm2_moe": Lfm2MoeConfig(
        **_WITHOUT_HEAD_DIM,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        conv_bias=True,
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=37,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "mixtral": MixtralConfig(**_SIZES, num_local_experts=5, num_experts_per_tok=2, sliding_window=None),
    "mixtral-window": MixtralConfig(**_SIZES, num_local_experts=5, num_experts_per_tok=2, sliding_window=7),
    "qwen3_moe": Qwen3MoeConfig(
        **{**_QWEN, "head_dim": 64},
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=37,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "olmo3": Olmo3Config(
        **{**_SIZES, "num_hidden_layers": 5},
        sliding_window=7,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 2e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "gemma4": Gemma4TextConfig(
        **{**_SIZES, "num_hidden_layers": 6, "num_key_value_heads": 3},
        global_head_dim=64,
        sliding_window=7,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=211,
        hidden_size_per_layer_input=10,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        final_logit_softcapping=20.0,
    ),
    "gemma4-experts": Gemma4TextConfig(
        **{**_SIZES, "num_hidden_layers": 4},
        global_head_dim=64,
        num_global_key_value_heads=1,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=37,
    ),
    "deepseek_v2": DeepseekV2Config(
        **_DEEPSEEK,
        q_lora_rank=None,
        topk_method="group_limited_greedy",
        n_shared_experts=2,
        mlp_bias=True,
        attention_bias=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 0.7,
            "mscale_all_dim": 0.5,
        },
    ),
    "deepseek_v3": DeepseekV3Config(**_DEEPSEEK, q_lora_rank=26, n_shared_experts=1, norm_topk_prob=True),
    "glm4_moe_lite": Glm4MoeLiteConfig(
        **{field: size for field, size in _DEEPSEEK.items() if field != "first_k_dense_replace"},
        q_lora_rank=None,
        n_shared_experts=2,
        norm_topk_prob=False,
        attention_bias=True,
        rope_interleave=False,
        mlp_layer_types=["sparse", "dense", "sparse"],
        tie_word_embeddings=True,
    ),
    "mistral4": Mistral4Config(
        **_DEEPSEEK,
        q_lora_rank=26,
        n_shared_experts=2,
        norm_topk_prob=True,
        attention_bias=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 0.7,
            "mscale_all_dim": 0.5,
            "llama_4_scaling_beta": 0.3,
        },
    ),
}
"""Name of a checkpoint -> its config."""


def make_checkpoint(name: str, path: Path | str, seed: int = 0, **changes: Any) -> PreTrainedModel | SharedKVLlama:
    """Saves the random checkpoint `name` under `path`; returns the float32 model it was saved from.

    `changes` are of its config's fields.

    Weights are wider than transformers' initialization, and norms and biases are random too, so that logits
    differ between tokens by about one and no parameter can be left out unnoticed.
    """
    torch.manual_seed(seed)
    config = copy.deepcopy((CHECKPOINTS | DENSE_FAMILIES)[name])
    for field, value in changes.items():
        setattr(config, field, value)
    if getattr(config, "use_cla", False):
        model = SharedKVLlama(config)
    else:
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        # Mistral 4 is published inside a model with pictures; transformers' table of text models lacks it.
        make = Mistral4ForCausalLM._from_config if name == "mistral4" else AutoModelForCausalLM.from_config
        model = make(config, dtype=torch.float32, **plain)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, weight.shape[1] ** -0.5)
            else:
                weight.normal_(_centre(name, key), 0.2)
        for key, buffer in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.2)
            elif key.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2)
    model.save_pretrained(path)
    return model.eval()


def _centre(name: str, key: str) -> float:
    """Return the centre of a vector's entries: one where they scale, unless they say how far they are from it."""
    if name.startswith("gemma4"):  # nothing but the norms of queries and keys keeps its scores small
        return 0.4 if key.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
    from_one = name == "nemotron" or name.startswith(("gemma", "qwen3_next", "qwen3_5"))
    if from_one and not key.endswith("linear_attn.norm.weight"):
        return 0.0
    scales = key.endswith(("norm.weight", "norm_f.weight", ".D", "ln_1.weight", "ln_2.weight", "ln_f.weight")) or (
        "layernorm." in key and key.endswith(".weight")
    )
    return 1.0 if scales else 0.0
