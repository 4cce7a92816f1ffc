"""Tiny random checkpoints of the families in `models/families.py`: every switch of a row differs from its default."""

from transformers import (
    ApertusConfig,
    ArceeConfig,
    CohereConfig,
    CwmConfig,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GPTNeoXConfig,
    GraniteConfig,
    GraniteMoeConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    MiniMaxM2Config,
    Ministral3Config,
    NemotronConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    Qwen2MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

_PLAIN = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 109,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_SIZES = {**_PLAIN, "head_dim": 24}
_PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0] * 6,
    "long_factor": [1.0, 1.3, 1.7, 2.5, 3.1, 4.0],
    "original_max_position_embeddings": 16,
}

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 37}
_GROUPED = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 37,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

DENSE_FAMILIES = {
    "apertus": ApertusConfig(**_PLAIN, attention_bias=True),
    "phi3": Phi3Config(**_PLAIN, sliding_window=7, rope_parameters=_PARTIAL),
    "phi3-longrope": Phi3Config(
        **{**_PLAIN, "max_position_embeddings": 64}, original_max_position_embeddings=16, rope_parameters=_LONGROPE
    ),
    "granite": GraniteConfig(
        **_PLAIN,
        attention_bias=True,
        mlp_bias=True,
        embedding_multiplier=1.7,
        logits_scaling=0.7,
        residual_multiplier=0.6,
        attention_multiplier=0.4,
    ),
    "olmo2": Olmo2Config(**_PLAIN, attention_bias=True),
    "gemma": GemmaConfig(**{**_SIZES, "tie_word_embeddings": True}, attention_bias=True),
    "smollm3": SmolLM3Config(**_PLAIN, no_rope_layers=[1, 0, 1], attention_bias=True, mlp_bias=True),
    "smollm3-window": SmolLM3Config(
        **_PLAIN,
        no_rope_layers=[0, 1, 1],
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "glm4": Glm4Config(**_SIZES, rope_parameters=_PARTIAL),
    "glm": GlmConfig(**_SIZES, rope_parameters=_PARTIAL),
    "arcee": ArceeConfig(**_SIZES, attention_bias=True, mlp_bias=True),
    "nemotron": NemotronConfig(**_SIZES, attention_bias=True, mlp_bias=True, rope_parameters=_PARTIAL),
    "cwm": CwmConfig(
        **_SIZES,
        sliding_window=7,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "seed_oss": SeedOssConfig(**_SIZES, attention_out_bias=True, mlp_bias=True),
    "ernie4_5": Ernie4_5Config(**_SIZES, use_bias=True),
    "starcoder2": Starcoder2Config(**_PLAIN, sliding_window=7),
    "gpt_neox": GPTNeoXConfig(
        **{field: size for field, size in _PLAIN.items() if field != "num_key_value_heads"}, rope_parameters=_PARTIAL
    ),
    "gpt_neox-in-turn": GPTNeoXConfig(
        **{field: size for field, size in _PLAIN.items() if field != "num_key_value_heads"},
        use_parallel_residual=False,
        attention_bias=False,
        rope_parameters=_PARTIAL,
    ),
    "stablelm": StableLmConfig(**_PLAIN, use_qkv_bias=True, rope_parameters=_PARTIAL),
    "stablelm-parallel": StableLmConfig(
        **_PLAIN, qk_layernorm=True, use_parallel_residual=True, rope_parameters=_PARTIAL
    ),
    "phi": PhiConfig(**_PLAIN, qk_layernorm=True, rope_parameters=_PARTIAL),
    "cohere": CohereConfig(**_PLAIN, logit_scale=0.9, attention_bias=True, use_qk_norm=True),
    "hunyuan_v1_dense": HunYuanDenseV1Config(
        **_SIZES,
        attention_bias=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
    ),
    "exaone4": Exaone4Config(
        **_PLAIN, sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "exaone4-full": Exaone4Config(**_PLAIN, sliding_window=None, layer_types=["full_attention"] * 3),
    "ministral3": Ministral3Config(
        **_SIZES,
        sliding_window=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **_PLAIN,
        **_EXPERTS,
        shared_expert_intermediate_size=35,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=_TYPES,
    ),
    "olmoe": OlmoeConfig(**_PLAIN, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True, attention_bias=True),
    "glm4_moe": Glm4MoeConfig(
        **_SIZES, **_GROUPED, use_qk_norm=True, attention_bias=True, rope_parameters=_PARTIAL, num_mtp_layers=0
    ),
    "dots1": Dots1Config(
        **_SIZES, **_GROUPED, norm_topk_prob=True, attention_bias=True, sliding_window=7, layer_types=_TYPES
    ),
    "minimax_m2": MiniMaxM2Config(
        **_SIZES, num_local_experts=6, num_experts_per_tok=3, rope_parameters=_PARTIAL, rotary_dim=12
    ),
    "ernie4_5_moe": Ernie4_5_MoeConfig(
        **{**_SIZES, "num_hidden_layers": 4},
        use_bias=True,
        moe_num_experts=6,
        moe_k=3,
        moe_intermediate_size=37,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=2,
        moe_norm_min=0.7,
    ),
    "granitemoe": GraniteMoeConfig(
        **_PLAIN,
        num_local_experts=6,
        num_experts_per_tok=3,
        attention_bias=True,
        embedding_multiplier=1.7,
        logits_scaling=0.7,
        residual_multiplier=0.6,
        attention_multiplier=0.4,
    ),
    "hunyuan_v1_moe": HunYuanMoEV1Config(
        **_SIZES,
        num_experts=6,
        moe_topk=[3, 3, 3],
        attention_bias=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
    ),
}
"""Name of a checkpoint -> its config."""
