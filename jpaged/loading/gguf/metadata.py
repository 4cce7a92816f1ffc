"""Checks the types of the keys of a GGUF file that are read, so that what reads them need not.

Keys that are not here are not read, and may have any value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jpaged.loading.gguf.reader import GGUFFile

_MOST = 1 << 16
"""The largest number of layers: more are damage, and would be lists of as many entries."""


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _positive(value: Any) -> bool:
    return _whole(value) and value > 0


def _layers(value: Any) -> bool:
    return _positive(value) and value <= _MOST


def _real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _above_zero(value: Any) -> bool:
    return _real(value) and value > 0


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _by_layer(value: Any) -> bool:
    """Tell whether a value is a whole number, or a list of some."""
    return _whole(value) or (_list_of(_whole)(value) and value != [])


def _pattern(value: Any) -> bool:
    return _positive(value) or (_list_of(_flag)(value) and value != [])


def _list_of(each: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(each, value))


_IN_WORDS: Mapping[Callable[[Any], bool], str] = {
    _whole: "a whole number",
    _positive: "a positive whole number",
    _layers: f"a positive whole number of at most {_MOST}",
    _real: "a finite number",
    _above_zero: "a positive number",
    _flag: "true or false",
    _text: "a text",
    _by_layer: "a whole number, or one for each layer",
    _pattern: "a positive whole number, or true or false for each layer",
}

_OF_MODELS: Mapping[Callable[[Any], bool], tuple[str, ...]] = {
    _layers: ("block_count",),
    _positive: (
        *("context_length", "embedding_length", "full_attention_interval", "interleave_moe_layer_step"),
        *("attention.key_length", "attention.value_length", "attention.key_length_swa"),
        *("attention.key_length_mla", "attention.value_length_mla", "attention.kv_lora_rank"),
        *("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count"),
        *("shortconv.l_cache", "rope.scaling.original_context_length"),
    ),
    _whole: (
        *("nextn_predict_layers", "leading_dense_block_count", "embedding_length_per_layer_input", "pooling_type"),
        *("expert_count", "expert_used_count", "expert_shared_count", "expert_group_count", "expert_group_used_count"),
        *("expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_gating_func", "moe_latent_size"),
        *("attention.sliding_window", "attention.shared_kv_layers", "attention.q_lora_rank"),
        *("rope.dimension_count", "rope.dimension_count_swa"),
    ),
    _by_layer: ("feed_forward_length", "attention.head_count", "attention.head_count_kv"),
    _pattern: ("attention.sliding_window_pattern",),
    _above_zero: (
        *("rope.freq_base", "rope.freq_base_swa"),
        *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    ),
    _real: (
        *("rope.scale_linear", "rope.scaling.factor", "rope.scaling.attn_factor", "logit_scale", "embedding_scale"),
        *("residual_scale", "attention.scale", "attention.temperature_scale", "attention.temperature_length"),
        *("expert_weights_scale", "attn_logit_softcapping", "final_logit_softcapping"),
        *("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    ),
    _flag: ("attention.causal", "expert_weights_norm", "rope.scaling.finetuned", "use_parallel_residual"),
    _text: ("rope.scaling.type", "hidden_activation"),
}
"""Keys after the architecture, by what their values must be."""

_OF_TOKENIZERS: Mapping[Callable[[Any], bool], tuple[str, ...]] = {
    _text: ("model", "pre"),
    _whole: tuple(
        f"{role}_token_id" for role in ("bos", "eos", "eot", "eom", "unknown", "padding", "cls", "seperator", "mask")
    ),
    _flag: ("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"),
}
_LISTS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "tokens": (_text, "texts"),
    "merges": (_text, "texts"),
    "scores": (_real, "finite numbers"),
    "token_type": (_whole, "whole numbers"),
}


def check_model(file: GGUFFile) -> None:
    """Raise ValueError, naming file and key, if a key of the model has a value of a wrong type."""
    arch = file.metadata.get("general.architecture")
    _check(file, {must: tuple(f"{arch}.{key}" for key in keys) for must, keys in _OF_MODELS.items()})


def check_tokenizer(file: GGUFFile) -> None:
    """Raise ValueError, naming file and key, if a key of the tokenizer has a value of a wrong type, or a list has not
    an entry for each token."""
    beginning = "tokenizer.ggml."
    own = {must: tuple(beginning + key for key in keys) for must, keys in _OF_TOKENIZERS.items()}
    _check(file, own | {_text: (*own[_text], "tokenizer.chat_template")})
    count = 0
    for key, (each, words) in _LISTS.items():
        name = beginning + key
        if name not in file.metadata:
            continue
        value = file.metadata[name]
        if not _list_of(each)(value):
            raise ValueError(f"{file.path}: {name}={repr(value)[:80]} is no list of {words}")
        if key == "tokens":
            count = len(value)
        elif key in ("scores", "token_type") and len(value) != count:
            raise ValueError(f"{file.path}: {name} has {len(value)} entries, and there are {count} tokens")
    broken = next((one for one in file.metadata.get(f"{beginning}merges", []) if " " not in one[1:]), None)
    if broken is not None:
        raise ValueError(f"{file.path}: {beginning}merges has {broken[:80]!r}, which is no two parts")


def _check(file: GGUFFile, kinds: Mapping[Callable[[Any], bool], tuple[str, ...]]) -> None:
    for must, keys in kinds.items():
        for key in keys:
            if key in file.metadata and not must(file.metadata[key]):
                value = repr(file.metadata[key])[:80]
                raise ValueError(f"{file.path}: {key}={value} must be {_IN_WORDS[must]}")
