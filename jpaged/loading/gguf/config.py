"""Makes a transformers config from GGUF metadata, for the architectures whose metadata is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jpaged.loading.gguf.expert_configs import gpt_oss, llama4, mixtral, qwen3_moe
from jpaged.loading.gguf.fields import field, transformer
from jpaged.loading.gguf.gemma_configs import gemma2, gemma3, gemma4
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.state_configs import jamba, lfm2, mamba2
from jpaged.loading.hugging_face import transformers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def config_from_gguf(file: GGUFFile) -> PretrainedConfig:
    """Return the config that a Hugging Face checkpoint of the same model would have.

    Raises:
        ValueError: for an architecture or a rope scaling that is not supported, or a missing key; names it.
    """
    arch = file.metadata.get("general.architecture")
    if arch not in _FAMILIES:
        raise ValueError(f"{file.path}: GGUF architecture {arch!r} is not supported; supported: {', '.join(_FAMILIES)}")
    if arch not in _MAY_HAVE_EXPERTS and field(file, "expert_count", 0):
        raise ValueError(f"{file.path}: mixture-of-experts GGUF files (expert_count > 0) of {arch} are not supported")
    for key, known in _ONLY.items():
        if (value := field(file, key, known[0])) not in known:
            raise ValueError(f"{file.path}: {key}={value} is not supported; {key}={known[0]} is")
    return _FAMILIES[arch](file)


def _llama(file: GGUFFile) -> PretrainedConfig:
    if field(file, "expert_count", 0):
        return mixtral(file)
    return transformers().LlamaConfig(
        **transformer(file),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


def _qwen2(file: GGUFFile) -> PretrainedConfig:
    return transformers().Qwen2Config(**transformer(file))


def _qwen3(file: GGUFFile) -> PretrainedConfig:
    return transformers().Qwen3Config(**transformer(file), attention_bias="blk.0.attn_q.bias" in file.tensors)


_FAMILIES: dict[str, Callable[[GGUFFile], PretrainedConfig]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "qwen3moe": qwen3_moe,
    "llama4": llama4,
    "gpt-oss": gpt_oss,
    "mamba2": mamba2,
    "jamba": jamba,
    "lfm2": lfm2,
}
_MAY_HAVE_EXPERTS = ("llama", "qwen3moe", "llama4", "gpt-oss", "jamba", "gemma4")

_ONLY: dict[str, tuple[float | bool, ...]] = {"attention.causal": (True,), "expert_weights_scale": (1.0, 0.0)}
"""Keys with the only values that are supported, for all architectures; llama.cpp writes 0 for an unused scale."""
