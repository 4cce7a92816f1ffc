"""Small GGUF files, written with the `gguf` package as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

SIZES = {
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
}


def write_gguf(
    path: Path, arch: str, tensors: dict[str, Any], extra: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """`tensors` are arrays or (bytes array, encoding); `changes` override `SIZES` (dots as __, None omits)."""
    writer = GGUFWriter(path, arch)
    sizes = SIZES | {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in {**{f"{arch}.{k}": v for k, v in sizes.items()}, **(extra or {})}.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            (writer.add_int32 if value < 0 else writer.add_uint32)(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        data, encoding = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=encoding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


EMBEDDING = {"token_embd.weight": np.zeros((32, 64), np.float32)}

VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [*"abcdefgh", "<s>", "</s>", "ab"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 8,
    "tokenizer.ggml.eos_token_id": 9,
}


def write_quantised_llama(path: Path, encoding: GGMLQuantizationType) -> Path:
    """A model of `SIZES` that can run: random matrices in `encoding`, norms of ones."""
    rng = np.random.default_rng(0)
    ones = np.ones(64, np.float32)
    shapes = {"token_embd": (32, 64)}
    tensors: dict[str, Any] = {"output_norm.weight": ones}
    for block in ("blk.0", "blk.1"):
        tensors |= {f"{block}.attn_norm.weight": ones, f"{block}.ffn_norm.weight": ones}
        shapes |= {
            f"{block}.attn_{part}": (64 if part in ("q", "output") else 32, 64) for part in ["q", "k", "v", "output"]
        }
        shapes |= {f"{block}.ffn_gate": (96, 64), f"{block}.ffn_up": (96, 64), f"{block}.ffn_down": (64, 96)}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, np.float32) * 0.05
        tensors[f"{name}.weight"] = quants.quantize(values, encoding), encoding
    return write_gguf(path, "llama", tensors, VOCABULARY)
