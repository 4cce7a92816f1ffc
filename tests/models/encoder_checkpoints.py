"""Tiny random checkpoints of the encoders in `models/encoder_families.py`, of which every switch of a row is tried, and
of decoders whose config asks for attention in both directions."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModel,
    BertConfig,
    DistilBertConfig,
    Gemma3TextConfig,
    GteConfig,
    LlamaConfig,
    ModernBertConfig,
    MPNetConfig,
    NomicBertConfig,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

_SIZES = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 61,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 72,
    "pad_token_id": 1,
}

ENCODERS = {
    "bert": BertConfig(**_SIZES, type_vocab_size=3, layer_norm_eps=0.01),
    "roberta": RobertaConfig(**_SIZES, type_vocab_size=1),
    "xlm-roberta": XLMRobertaConfig(**_SIZES, type_vocab_size=1, hidden_act="gelu_new"),
    "distilbert": DistilBertConfig(
        vocab_size=211,
        dim=48,
        hidden_dim=61,
        n_layers=3,
        n_heads=3,
        max_position_embeddings=72,
        activation="relu",
        pad_token_id=1,
    ),
    "mpnet": MPNetConfig(**_SIZES, layer_norm_eps=0.02),
    "nomic_bert": NomicBertConfig(**_SIZES, type_vocab_size=2),
    "gte": GteConfig(**_SIZES, type_vocab_size=2, rope_parameters={"rope_type": "default", "rope_theta": 40.0}),
    "modernbert": ModernBertConfig(
        **_SIZES,
        local_attention=10,
        norm_bias=True,
        attention_bias=True,
        mlp_bias=True,
        bos_token_id=2,
        eos_token_id=3,
        cls_token_id=2,
        sep_token_id=3,
        classifier_pooling="mean",
        classifier_bias=True,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 160.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        },
    ),
    "embedding_gemma": Gemma3TextConfig(
        **_SIZES,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=25,
        sliding_window=11,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        use_bidirectional_attention=True,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 160.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        },
    ),
    "llama": LlamaConfig(**_SIZES, is_causal=False),
    "qwen2": Qwen2Config(**_SIZES, num_key_value_heads=1, is_causal=False, tie_word_embeddings=True),
    "qwen3": Qwen3Config(
        **_SIZES,
        num_key_value_heads=1,
        head_dim=16,
        is_causal=False,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    ),
}


def make_encoder(name: str, folder: Path, kind: type = AutoModel, **changes):
    """Save a random checkpoint whose vectors are no zeros and whose scales no ones; returns transformers' model."""
    torch.manual_seed(0)
    config = ENCODERS[name]
    config = config.__class__(**config.to_dict() | changes)
    model = kind.from_config(config) if kind.__name__.startswith("Auto") else kind(config)
    model = model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.1))
    model.save_pretrained(folder)
    return model
