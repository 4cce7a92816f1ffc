"""Small GGUF files, written with the `gguf` package as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

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
            writer.add_uint32(key, value)
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
