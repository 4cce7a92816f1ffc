"""GGUF metadata to a transformers config, for the architectures whose metadata says everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jpaged.loading.gguf_reader import GGUFFile
from jpaged.loading.hugging_face import transformers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def config_from_gguf(file: GGUFFile) -> PretrainedConfig:
    """The config a Hugging Face checkpoint of the same model would have.

    Raises:
        ValueError: for an architecture or a rope scaling that is not supported, or a missing key; names it.
    """
    arch = file.metadata.get("general.architecture")
    if arch not in _FAMILIES:
        raise ValueError(f"{file.path}: GGUF architecture {arch!r} is not supported; supported: {', '.join(_FAMILIES)}")
    if _get(file, "expert_count", 0):
        raise ValueError(f"{file.path}: mixture-of-experts GGUF files (expert_count > 0) are not supported")
    return _FAMILIES[arch](file, _common(file))


def _get(file: GGUFFile, key: str, default: Any = None) -> Any:
    """The value of ``{architecture}.{key}``; without a default, a missing key raises."""
    full = f"{file.metadata['general.architecture']}.{key}"
    value = file.metadata.get(full, default)
    if value is None:
        raise ValueError(f"{file.path}: GGUF metadata has no {full}")
    return value


def _common(file: GGUFFile) -> dict[str, Any]:
    embed, heads = _get(file, "embedding_length"), _get(file, "attention.head_count")
    head_dim = _get(file, "attention.key_length", embed // heads)
    rotated = _get(file, "rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(f"{file.path}: rope.dimension_count={rotated} of head size {head_dim}: not supported")
    metadata = file.metadata
    return {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": embed,
        "intermediate_size": _get(file, "feed_forward_length"),
        "num_hidden_layers": _get(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _get(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": _get(file, "context_length"),
        "rms_norm_eps": _shortest(_get(file, "attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(file, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _shortest(value: float) -> float:
    """The decimal number a float32 was written as: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    theta = _shortest(_get(file, "rope.freq_base", 10000.0))
    scaling = _get(file, "rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return {"rope_theta": theta, **_llama3_rope(file, theta, head_dim)}
    if scaling == "linear":
        return {"rope_theta": theta, "rope_type": "linear", "factor": _get(file, "rope.scaling.factor")}
    if scaling != "none":
        raise ValueError(f"{file.path}: rope.scaling.type={scaling!r} is not supported; none and linear are")
    return {"rope_theta": theta, "rope_type": "default"}


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.1 files hold only the resulting divisors of the frequencies; find the parameters that give them."""
    divisors = np.asarray(file.stored_rows("rope_freqs.weight"), np.float32)
    factor = float(divisors.max())
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    inverse = theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = 8192 / (2 * np.pi * inverse)
    smooth = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ValueError(f"{file.path}: rope_freqs.weight is not Llama 3's rope scaling; not supported")
    return rope


def _llama(file: GGUFFile, common: dict[str, Any]) -> PretrainedConfig:
    return transformers().LlamaConfig(
        **common,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


def _qwen2(file: GGUFFile, common: dict[str, Any]) -> PretrainedConfig:
    return transformers().Qwen2Config(**common)


def _qwen3(file: GGUFFile, common: dict[str, Any]) -> PretrainedConfig:
    return transformers().Qwen3Config(**common, attention_bias="blk.0.attn_q.bias" in file.tensors)


def _gemma2(file: GGUFFile, common: dict[str, Any]) -> PretrainedConfig:
    # The file does not say how queries are scaled. As in llama.cpp: the 27B model (46 layers) by
    # embed / heads, the smaller ones by the head size.
    is_27b = common["num_hidden_layers"] == 46
    scalar = common["hidden_size"] // common["num_attention_heads"] if is_27b else common["head_dim"]
    return transformers().Gemma2Config(
        **common,
        query_pre_attn_scalar=scalar,
        sliding_window=_get(file, "attention.sliding_window"),
        attn_logit_softcapping=_get(file, "attn_logit_softcapping"),
        final_logit_softcapping=_get(file, "final_logit_softcapping"),
    )


_FAMILIES: dict[str, Callable[[GGUFFile, dict[str, Any]], PretrainedConfig]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
}
