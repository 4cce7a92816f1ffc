"""Checks the types of the keys of a GGUF file that are read, so that what reads them need not.

Keys that are not here are not read, and may have any value.
"""

from __future__ import annotations

from collections.abc import Mapping

from jpaged.loading.field_types import (
    ABOVE_ZERO,
    FLAG,
    POSITIVE,
    REAL,
    TEXT,
    WHOLE,
    Type,
    check_field,
    check_fields,
    list_of,
)
from jpaged.loading.gguf.reader import GGUFFile

_MOST = 1 << 16
"""The largest number of layers: more are damage, and would be lists of as many entries."""
_LAYERS = Type(lambda value: POSITIVE.holds(value) and value <= _MOST, f"a positive whole number of at most {_MOST}")
_BY_LAYER = Type(
    lambda value: WHOLE.holds(value) or (value != [] and list_of(WHOLE, "").holds(value)),
    "a whole number, or one for each layer",
)
_PATTERN = Type(
    lambda value: POSITIVE.holds(value) or (value != [] and list_of(FLAG, "").holds(value)),
    "a positive whole number, or true or false for each layer",
)

_OF_MODELS: Mapping[Type, tuple[str, ...]] = {
    _LAYERS: ("block_count",),
    POSITIVE: (
        *("context_length", "embedding_length", "full_attention_interval", "interleave_moe_layer_step"),
        *("attention.key_length", "attention.value_length", "attention.key_length_swa"),
        *("attention.key_length_mla", "attention.value_length_mla", "attention.kv_lora_rank"),
        *("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count"),
        *("shortconv.l_cache", "rope.scaling.original_context_length"),
    ),
    WHOLE: (
        *("nextn_predict_layers", "leading_dense_block_count", "embedding_length_per_layer_input", "pooling_type"),
        *("expert_count", "expert_used_count", "expert_shared_count", "expert_group_count", "expert_group_used_count"),
        *("expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_gating_func", "moe_latent_size"),
        *("attention.sliding_window", "attention.shared_kv_layers", "attention.q_lora_rank"),
        *("rope.dimension_count", "rope.dimension_count_swa"),
    ),
    _BY_LAYER: ("feed_forward_length", "attention.head_count", "attention.head_count_kv"),
    _PATTERN: ("attention.sliding_window_pattern",),
    ABOVE_ZERO: (
        *("rope.freq_base", "rope.freq_base_swa"),
        *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    ),
    REAL: (
        *("rope.scale_linear", "rope.scaling.factor", "rope.scaling.attn_factor", "logit_scale", "embedding_scale"),
        *("residual_scale", "attention.scale", "attention.temperature_scale", "attention.temperature_length"),
        *("expert_weights_scale", "attn_logit_softcapping", "final_logit_softcapping"),
        *("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    ),
    FLAG: ("attention.causal", "expert_weights_norm", "rope.scaling.finetuned", "use_parallel_residual"),
    TEXT: ("rope.scaling.type", "hidden_activation"),
}
"""Keys after the architecture, by what their values must be."""

TEMPLATE = "tokenizer.chat_template"
"""Key of the chat template; further ones, as that for conversations with tools, have their names after it."""
_BYTES = list_of(Type(lambda value: WHOLE.holds(value) and value < 256, ""), "a list of bytes")
_OF_TOKENIZERS: Mapping[Type, tuple[str, ...]] = {
    TEXT: ("model", "pre"),
    WHOLE: tuple(
        f"{role}_token_id" for role in ("bos", "eos", "eot", "eom", "unknown", "padding", "cls", "seperator", "mask")
    ),
    FLAG: ("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"),
    list_of(TEXT, "a list of texts"): ("tokens", "merges"),
    list_of(REAL, "a list of finite numbers"): ("scores",),
    list_of(WHOLE, "a list of whole numbers"): ("token_type",),
    _BYTES: ("precompiled_charsmap",),
}


def check_model(file: GGUFFile) -> None:
    """Raise ValueError, naming file and key, if a key of the model has a value of a wrong type."""
    arch = file.metadata.get("general.architecture")
    _check(file, f"{arch}.", _OF_MODELS)


def check_tokenizer(file: GGUFFile) -> None:
    """Raise ValueError, naming file and key, if a key of the tokenizer has a value of a wrong type, or a list has not
    an entry for each token."""
    beginning = "tokenizer.ggml."
    _check(file, beginning, _OF_TOKENIZERS)
    templates = [key for key in file.metadata if f"{key}.".startswith(f"{TEMPLATE}.")]
    check_fields(file.path, file.metadata, dict.fromkeys(templates, TEXT))
    if (key := f"{file.metadata.get('general.architecture')}.context_length") in file.metadata:
        check_field(file.path, key, file.metadata[key], POSITIVE)
    count = len(file.metadata.get(f"{beginning}tokens", []))
    for name in (f"{beginning}scores", f"{beginning}token_type"):
        if (found := len(file.metadata.get(name, [None] * count))) != count:
            raise ValueError(f"{file.path}: {name} has {found} entries, and there are {count} tokens")
    broken = next((one for one in file.metadata.get(f"{beginning}merges", []) if " " not in one[1:]), None)
    if broken is not None:
        raise ValueError(f"{file.path}: {beginning}merges has {broken[:80]!r}, which is no two parts")


def _check(file: GGUFFile, beginning: str, types: Mapping[Type, tuple[str, ...]]) -> None:
    check_fields(file.path, file.metadata, {beginning + key: of for of, keys in types.items() for key in keys})
