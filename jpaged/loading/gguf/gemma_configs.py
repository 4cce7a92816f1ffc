"""Makes the configs of Gemma 2, 3 and 4 from GGUF metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jpaged.loading.gguf.fields import field, shortest, transformer
from jpaged.loading.gguf.names import unknown_tensors
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.hugging_face import transformers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def gemma2(file: GGUFFile) -> PretrainedConfig:
    """Return the config of architecture ``gemma2``."""
    fields = transformer(file)
    return transformers().Gemma2Config(
        **fields,
        query_pre_attn_scalar=_query_scalar(fields, layers_of_27b=46),
        sliding_window=field(file, "attention.sliding_window"),
        attn_logit_softcapping=field(file, "attn_logit_softcapping"),
        final_logit_softcapping=field(file, "final_logit_softcapping"),
    )


def gemma3(file: GGUFFile) -> PretrainedConfig:
    """Return the config of architecture ``gemma3``.

    Files name neither the local layers' frequencies nor which layers are local, unless they differ from Google's.
    """
    fields = transformer(file)
    rope = {_GLOBAL: fields.pop("rope_parameters"), _LOCAL: _local_rope(file)}
    return transformers().Gemma3TextConfig(
        **fields,
        query_pre_attn_scalar=_query_scalar(fields, layers_of_27b=62),
        sliding_window=field(file, "attention.sliding_window"),
        layer_types=_gemma3_layer_types(file, fields["num_hidden_layers"]),
        rope_parameters=rope,
        final_logit_softcapping=file.metadata.get("gemma3.final_logit_softcapping"),
    )


def gemma4(file: GGUFFile) -> PretrainedConfig:
    """Return the config of architecture ``gemma4``.

    Raises:
        ValueError: layers of one type differ, or the file has tensors that are not known, such as a second scale of a
            matrix; says which.
    """
    if unknown := unknown_tensors(file):
        raise ValueError(f"{file.path}: {len(unknown)} tensors of gemma4 are not supported, first: {unknown[0]}")
    fields: dict[str, Any] = transformer(file, rotates=False)
    layers, shared = fields["num_hidden_layers"], field(file, "attention.shared_kv_layers", 0)
    types = _listed_layer_types(file, layers)
    width, doubled = _mlp_widths(file, layers, shared)
    head_dim = field(file, "attention.key_length_swa")
    if (rotated := field(file, "rope.dimension_count_swa", head_dim)) != head_dim:
        raise ValueError(f"{file.path}: rope.dimension_count_swa={rotated} of head size {head_dim}: not supported")
    own_inputs = field(file, "embedding_length_per_layer_input", 0)
    local_kv, global_kv = _kv_heads(file, types)
    global_heads: dict[str, int] = {"head_dim": field(file, "attention.key_length")}
    if global_kv != local_kv:
        global_heads["num_key_value_heads"] = global_kv
    fields |= {"intermediate_size": width, "head_dim": head_dim, "num_key_value_heads": local_kv}
    if own_inputs and (table := file.tensors.get("per_layer_token_embd.weight")) is not None:
        fields["vocab_size_per_layer_input"] = table.shape[0]  # the loader tells where there is none
    return transformers().Gemma4TextConfig(
        **fields,
        **_gemma4_experts(file),
        layer_types=types,
        per_layer_config={number: dict(global_heads) for number, kind in enumerate(types) if kind == _GLOBAL},
        sliding_window=field(file, "attention.sliding_window"),
        rope_parameters={_LOCAL: _local_rope(file), _GLOBAL: _proportional_rope(file)},
        final_logit_softcapping=file.metadata.get("gemma4.final_logit_softcapping") or None,
        hidden_size_per_layer_input=own_inputs,
        num_kv_shared_layers=shared,
        use_double_wide_mlp=doubled,
        attention_k_eq_v=_values_are_keys(file, types, shared),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
    )


def _gemma3_layer_types(file: GGUFFile, layers: int) -> list[str]:
    """Return which layers slide: as listed, or all but every n-th, n being 6 where the file does not say."""
    pattern = field(file, "attention.sliding_window_pattern", 6)
    slides = pattern if isinstance(pattern, list) else [(n + 1) % pattern != 0 for n in range(layers)]
    return [_LOCAL if local else _GLOBAL for local in slides]


def _listed_layer_types(file: GGUFFile, layers: int) -> list[str]:
    """Return which layers slide, as Gemma 4's files list them; the last one must not."""
    slides = field(file, "attention.sliding_window_pattern")
    if not isinstance(slides, list) or len(slides) != layers or slides[-1]:
        raise ValueError(
            f"{file.path}: gemma4.attention.sliding_window_pattern={slides} must say of each of {layers} layers "
            "whether it slides, which the last one does not"
        )
    return [_LOCAL if local else _GLOBAL for local in slides]


def _query_scalar(fields: dict[str, Any], layers_of_27b: int) -> int:
    """Return Gemma's query scale, which files lack. llama.cpp takes ``embed / heads`` for the 27B model, which it knows
    by its number of layers, and the head size for smaller ones."""
    is_27b = fields["num_hidden_layers"] == layers_of_27b
    return fields["hidden_size"] // fields["num_attention_heads"] if is_27b else fields["head_dim"]


def _local_rope(file: GGUFFile) -> dict[str, Any]:
    return {"rope_theta": shortest(field(file, "rope.freq_base_swa", 10000.0)), "rope_type": "default"}


def _proportional_rope(file: GGUFFile) -> dict[str, Any]:
    """Return the rotation of Gemma 4's global layers: the file divides the frequencies of pairs that stand still by a
    number that leaves nothing of them, and those of the others, which come first, by one."""
    if (kind := file.metadata.get("gemma4.rope.scaling.type", "none")) != "none":
        raise ValueError(f"{file.path}: rope.scaling.type={kind!r} is not supported; none is")
    pairs = field(file, "attention.key_length") // 2
    if "rope_freqs.weight" not in file.tensors:
        raise ValueError(f"{file.path}: no tensor rope_freqs.weight, which says how much of a head is rotated")
    divisors = np.asarray(file.stored_rows("rope_freqs.weight"), np.float32)
    turning = int((divisors == 1).sum())
    if divisors.shape != (pairs,) or not np.all(divisors[:turning] == 1) or not np.all(divisors[turning:] > 1e20):
        raise ValueError(f"{file.path}: rope_freqs.weight is not ones and then 1e30; not supported")
    return {
        "rope_theta": shortest(field(file, "rope.freq_base")),
        "rope_type": "proportional",
        "partial_rotary_factor": turning / pairs,
    }


def _mlp_widths(file: GGUFFile, layers: int, shared: int) -> tuple[int, bool]:
    """Return the MLPs' width, and whether layers that read the KV of others have twice that."""
    widths = field(file, "feed_forward_length")
    if not isinstance(widths, list):
        return widths, False
    first = widths[0]
    for doubled in (False, True):
        if widths == [first] * (layers - shared) + [first * (1 + doubled)] * shared:
            return first, doubled
    raise ValueError(
        f"{file.path}: gemma4.feed_forward_length={widths} must be one width, and it or its double in the "
        f"last {shared} of {layers} layers"
    )


def _kv_heads(file: GGUFFile, types: list[str]) -> tuple[int, int]:
    """Return the numbers of KV heads of local and of global layers; the same where there is but one of them."""
    listed = field(file, "attention.head_count_kv")
    by_layer = listed if isinstance(listed, list) else [listed] * len(types)
    if len(by_layer) != len(types):
        raise ValueError(f"{file.path}: gemma4.attention.head_count_kv={listed} has no entry for each of {len(types)}")
    found = {kind: {heads for heads, own in zip(by_layer, types, strict=True) if own == kind} for kind in types}
    for kind, heads in found.items():
        if len(heads) > 1:
            raise ValueError(f"{file.path}: gemma4.attention.head_count_kv={listed}: layers of {kind} must be alike")
    (of_global,) = found[_GLOBAL]
    return next(iter(found.get(_LOCAL, found[_GLOBAL]))), of_global


def _values_are_keys(file: GGUFFile, types: list[str], shared: int) -> bool:
    """Return whether global layers that keep KV have no values of their own: all of them, or none."""
    keeping = range(len(types) - shared)
    without = {number for number in keeping if f"blk.{number}.attn_v.weight" not in file.tensors}
    if without and without != {number for number in keeping if types[number] == _GLOBAL}:
        raise ValueError(f"{file.path}: layers {sorted(without)} have no attn_v.weight, as all global ones or none may")
    return bool(without)


def _gemma4_experts(file: GGUFFile) -> dict[str, Any]:
    if not field(file, "expert_count", 0):
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": field(file, "expert_count"),
        "top_k_experts": field(file, "expert_used_count"),
        "moe_intermediate_size": field(file, "expert_feed_forward_length"),
    }
