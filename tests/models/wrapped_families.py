"""Tiny random checkpoints of models that take pictures, of which jpaged computes the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import CHECKPOINTS
from dense_families import DENSE_FAMILIES
from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Llama4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

TOKENS = np.random.default_rng(0).integers(3, 200, 30)
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGHT = {**EYES, "image_size": 28, "patch_size": 14}
"""A vision model's sizes."""
_SIZES = {
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
}
_QWEN_EYES = {"depth": 1, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2}
_GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_INSIDE = {"image_token_id": 205, "video_token_id": 206, "vision_start_token_id": 207, "tie_word_embeddings": False}
_NEW_ROPE = {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [6, 3, 3], "mrope_interleaved": True}


def text_of(name: str) -> dict[str, Any]:
    """Return a tiny text model's config, as it is written inside another."""
    return (CHECKPOINTS | DENSE_FAMILIES)[name].to_dict()


def mistral3(text: str) -> tuple[type, PretrainedConfig]:
    """Return a model with Pixtral's eyes around a text model."""
    vision = {**SIGHT, "model_type": "pixtral", "head_dim": 8}
    config = Mistral3Config(
        text_config=text_of(text), vision_config=vision, image_token_index=205, tie_word_embeddings=False
    )
    return Mistral3ForConditionalGeneration, config


BY_THEIR_TEXT: dict[str, tuple[type, PretrainedConfig]] = {
    "ministral3": mistral3("ministral3"),
    "mistral4": mistral3("mistral4"),
    "smolvlm": (
        SmolVLMForConditionalGeneration,
        SmolVLMConfig(text_config=text_of("llama"), vision_config=SIGHT, image_token_id=205, tie_word_embeddings=False),
    ),
    "qwen2_vl": (
        Qwen2VLForConditionalGeneration,
        Qwen2VLConfig(
            text_config={
                **_SIZES,
                "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
                "rope_theta": 5e4,
                "use_sliding_window": True,
                "sliding_window": 7,
                "max_window_layers": 1,
            },
            vision_config={**_QWEN_EYES, "embed_dim": 16, "hidden_size": 96},
            **_INSIDE,
        ),
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig(
            text_config={**_SIZES, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}, "rope_theta": 5e4},
            vision_config={**_QWEN_EYES, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 96},
            **_INSIDE,
        ),
    ),
    "qwen3_vl": (
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig(
            text_config={**_SIZES, "head_dim": 24, "attention_bias": True, "rope_parameters": _NEW_ROPE},
            vision_config={
                **_QWEN_EYES,
                "hidden_size": 16,
                "intermediate_size": 16,
                "out_hidden_size": 96,
                "deepstack_visual_indexes": [0],
            },
            **_INSIDE,
        ),
    ),
    "qwen3_vl_moe": (
        Qwen3VLMoeForConditionalGeneration,
        Qwen3VLMoeConfig(
            text_config={
                **_SIZES,
                "head_dim": 24,
                "num_experts": 6,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 36,
                "mlp_only_layers": [1],
                "rope_parameters": _NEW_ROPE,
            },
            vision_config={
                **_QWEN_EYES,
                "hidden_size": 16,
                "intermediate_size": 16,
                "out_hidden_size": 96,
                "deepstack_visual_indexes": [0],
            },
            **_INSIDE,
        ),
    ),
    "glm4v": (
        Glm4vForConditionalGeneration,
        Glm4vConfig(
            text_config={**_SIZES, "rope_parameters": _GLM_ROPE},
            vision_config={**EYES, "depth": 1, "num_heads": 2, "out_hidden_size": 96},
            **_INSIDE,
        ),
    ),
    "glm4v_moe": (
        Glm4vMoeForConditionalGeneration,
        Glm4vMoeConfig(
            text_config={
                **_SIZES,
                "head_dim": 16,
                "rope_parameters": _GLM_ROPE,
                "n_routed_experts": 6,
                "n_shared_experts": 2,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 37,
                "routed_scaling_factor": 1.7,
            },
            vision_config={**EYES, "depth": 1, "num_heads": 2, "out_hidden_size": 96},
            **_INSIDE,
        ),
    ),
    "paddleocr_vl": (
        PaddleOCRVLForConditionalGeneration,
        PaddleOCRVLConfig(
            text_config={
                **_SIZES,
                "head_dim": 24,
                "use_bias": True,
                "tie_word_embeddings": False,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [6, 3, 3]},
            },
            vision_config={**SIGHT},
            **_INSIDE,
        ),
    ),
}
"""Model class and config of each."""


def saved(family: type, config: PretrainedConfig, folder: Path) -> np.ndarray:
    """Save a random checkpoint.

    Returns:
        transformers' logits of `TOKENS` [tokens, vocab].
    """
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = family(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, weight.shape[1] ** -0.5)
        # The whole of Llama 4 fails in transformers 5.24; without images it does what its text model with a head does.
        judge = model.language_model if isinstance(model, Llama4ForConditionalGeneration) else model
        logits = judge(input_ids=torch.tensor(TOKENS)[None]).logits[0].numpy()
    model.save_pretrained(folder)
    return logits
