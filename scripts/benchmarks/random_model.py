"""Writes a random Gemma-3-shaped model, for measurements that need layers that differ but no real weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jpaged.loading.hugging_face import transformers

WINDOW = 64
MAX_LEN = 1024


def gemma3_config(
    *, hidden: int = 512, mlp: int = 1536, layers: int = 12, vocab: int = 4096, window: int = WINDOW
) -> dict[str, Any]:
    """Return the fields of a ``Gemma3TextConfig``: five local layers to a global one, heads of 64."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": window,
        "max_position_embeddings": MAX_LEN,
    }


def save_random_gemma3(folder: Path, fields: dict[str, int], seed: int = 0) -> None:
    """Write config.json and normally distributed float32 weights, wide enough that tokens differ in likelihood."""
    config = transformers().Gemma3TextConfig(**fields)
    config.save_pretrained(folder)
    rng = np.random.default_rng(seed)
    size, mlp, width = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
    matrices = {
        "self_attn.q_proj": (queries, size),
        "self_attn.k_proj": (keys, size),
        "self_attn.v_proj": (keys, size),
        "self_attn.o_proj": (size, queries),
        "mlp.gate_proj": (mlp, size),
        "mlp.up_proj": (mlp, size),
        "mlp.down_proj": (size, mlp),
    }
    norms = {"self_attn.q_norm": width, "self_attn.k_norm": width}
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        norms[f"{name}_layernorm"] = size
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((config.vocab_size, size), np.float32) * np.float32(0.04),
        "model.norm.weight": np.zeros(size, np.float32),
    }
    for number in range(config.num_hidden_layers):
        for name, shape in matrices.items():
            scale = np.float32(shape[1] ** -0.5)
            tensors[f"model.layers.{number}.{name}.weight"] = rng.standard_normal(shape, np.float32) * scale
        for name, length in norms.items():
            tensors[f"model.layers.{number}.{name}.weight"] = np.zeros(length, np.float32)
    save_file(tensors, folder / "model.safetensors")
