"""Tiny random checkpoints of every family, made by transformers, at sizes chosen to be awkward."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from shared_kv_llama import SharedKVLlama
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
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
}
"""Name of a checkpoint -> its config."""


def make_checkpoint(name: str, path: Path | str, seed: int = 0, **changes: Any) -> PreTrainedModel | SharedKVLlama:
    """Saves the random checkpoint `name` under `path`; returns the float32 model it was saved from.

    `changes` are of its config's fields.

    Weights are wider than transformers' initialization, and norms and biases are random too, so that logits
    differ between tokens by about one and no parameter can be left out unnoticed.
    """
    torch.manual_seed(seed)
    config = copy.deepcopy(CHECKPOINTS[name])
    for field, value in changes.items():
        setattr(config, field, value)
    if getattr(config, "use_cla", False):
        model = SharedKVLlama(config)
    else:
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **plain)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, weight.shape[1] ** -0.5)
            else:
                centre = 1.0 if key.endswith("norm.weight") and not name.startswith("gemma") else 0.0
                weight.normal_(centre, 0.2)
    model.save_pretrained(path)
    return model.eval()
