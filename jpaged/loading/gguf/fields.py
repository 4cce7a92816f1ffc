"""Reads the metadata that most architectures share, under the names of Hugging Face's configs."""

from __future__ import annotations

from typing import Any

import numpy as np

from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.rope import rope_parameters


def field(file: GGUFFile, key: str, default: Any = None) -> Any:
    """Return the value of ``{architecture}.{key}``; without a default, a missing key raises ValueError."""
    full = f"{file.metadata['general.architecture']}.{key}"
    value = file.metadata.get(full, default)
    if value is None:
        raise ValueError(f"{file.path}: GGUF metadata has no {full}")
    return value


def shortest(value: float) -> float:
    """Return the shortest decimal number of a float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def every_model(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of any language model: its vocabulary, width and depth."""
    metadata = file.metadata
    if (parts := metadata.get("split.count", 1)) > 1:
        raise ValueError(f"{file.path} is one of {parts} parts: join them by llama.cpp's gguf-split --merge")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} has no tensor token_embd.weight: it holds no model's weights")
    return {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": field(file, "embedding_length"),
        "num_hidden_layers": field(file, "block_count"),
        "max_position_embeddings": field(file, "context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def transformer(file: GGUFFile, *, rotates: bool = True) -> dict[str, Any]:
    """Return the fields of a model whose layers attend, and whose MLPs are gated.

    Args:
        rotates: whether positions are known by rotation; the fields then include ``rope_parameters``.

    Raises:
        ValueError: a rope scaling that is not supported, or a missing key; names it.
    """
    heads = field(file, "attention.head_count")
    if isinstance(heads, list):
        raise ValueError(f"{file.path}: attention.head_count={heads}: numbers of heads by layer are not supported")
    head_dim = field(file, "attention.key_length", field(file, "embedding_length") // heads)
    found = every_model(file) | {
        "intermediate_size": field(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _largest(field(file, "attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "rms_norm_eps": shortest(field(file, "attention.layer_norm_rms_epsilon")),
    }
    if rotates:
        rotated = field(file, "rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise ValueError(f"{file.path}: rope.dimension_count={rotated} of head size {head_dim}: not supported")
        theta = shortest(field(file, "rope.freq_base", 10000.0))
        found["rope_parameters"] = rope_parameters(file, theta, head_dim)
    return found


def _largest(heads: int | list[int]) -> int:
    """Return the largest number of heads; a list has one per layer, 0 for layers that do not attend."""
    return max(heads) if isinstance(heads, list) else heads
