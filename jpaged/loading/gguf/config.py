"""Makes a transformers config of GGUF metadata, for the architectures whose metadata says everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jpaged.loading.gguf.expert_configs import gpt_oss, llama4, mixtral, qwen3_moe
from jpaged.loading.gguf.fields import field, shortest, transformer
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


def _gemma2(file: GGUFFile) -> PretrainedConfig:
    fields = transformer(file)
    return transformers().Gemma2Config(
        **fields,
        query_pre_attn_scalar=_query_scalar(fields, layers_of_27b=46),
        sliding_window=field(file, "attention.sliding_window"),
        attn_logit_softcapping=field(file, "attn_logit_softcapping"),
        final_logit_softcapping=field(file, "final_logit_softcapping"),
    )


def _gemma3(file: GGUFFile) -> PretrainedConfig:
    # Files name neither the local layers' frequencies nor which layers are local, unless they differ from Google's.
    fields = transformer(file)
    local = shortest(field(file, "rope.freq_base_swa", 10000.0))
    rope = {
        "full_attention": fields.pop("rope_parameters"),
        "sliding_attention": {"rope_theta": local, "rope_type": "default"},
    }
    cap = file.metadata.get("gemma3.final_logit_softcapping")
    return transformers().Gemma3TextConfig(
        **fields,
        query_pre_attn_scalar=_query_scalar(fields, layers_of_27b=62),
        sliding_window=field(file, "attention.sliding_window"),
        layer_types=_gemma3_layer_types(file, fields["num_hidden_layers"]),
        rope_parameters=rope,
        final_logit_softcapping=cap,
    )


def _gemma3_layer_types(file: GGUFFile, layers: int) -> list[str]:
    """Return which layers slide: as listed, or all but every n-th, n being 6 where the file does not say."""
    pattern = field(file, "attention.sliding_window_pattern", 6)
    slides = pattern if isinstance(pattern, list) else [(n + 1) % pattern != 0 for n in range(layers)]
    return ["sliding_attention" if local else "full_attention" for local in slides]


def _query_scalar(fields: dict[str, Any], layers_of_27b: int) -> int:
    """Return Gemma's query scale, which files lack. llama.cpp takes ``embed / heads`` for the 27B model, which it knows
    by its number of layers, and the head size for smaller ones."""
    is_27b = fields["num_hidden_layers"] == layers_of_27b
    return fields["hidden_size"] // fields["num_attention_heads"] if is_27b else fields["head_dim"]


_FAMILIES: dict[str, Callable[[GGUFFile], PretrainedConfig]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "qwen3moe": qwen3_moe,
    "llama4": llama4,
    "gpt-oss": gpt_oss,
    "mamba2": mamba2,
    "jamba": jamba,
    "lfm2": lfm2,
}
_MAY_HAVE_EXPERTS = ("llama", "qwen3moe", "llama4", "gpt-oss", "jamba")
