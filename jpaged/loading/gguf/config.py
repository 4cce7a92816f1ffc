"""Makes a config from GGUF metadata, for the architectures whose metadata is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jpaged.loading.gguf.encoders import ENCODERS
from jpaged.loading.gguf.families import (
    FAMILIES,
    SCALED_EXPERTS,
    WITH_EXPERTS,
    Fields,
)
from jpaged.loading.gguf.fields import (
    GLOBAL,
    LOCAL,
    field,
    shortest,
    transformer,
    types_of_layers,
    whole_width,
)
from jpaged.loading.gguf.metadata import check_model
from jpaged.loading.gguf.mmproj import Pair
from jpaged.loading.gguf.names import unknown_tensors
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.recurrent import RECURRENT
from jpaged.loading.model_config import AnyConfig, own_config, transformers_config
from jpaged.loading.registry import model_class, model_types


def config_from_gguf(file: GGUFFile) -> AnyConfig:
    """Return the config that a Hugging Face checkpoint of the same model would have.

    Raises:
        ValueError: for an architecture or a rope scaling that is not supported, or a key that is missing or of a wrong
            type; names it.
    """
    check_model(file)
    return _config(_fields(file))


def config_of_pair(pair: Pair) -> AnyConfig:
    """Return the config of a text model with the vision tower of another file.

    Raises:
        ValueError: see `config_from_gguf`, or both files do not go together.
    """
    check_model(pair.files.text)
    return _config(pair.fields(_fields(pair.files.text)))


def _config(fields: Fields) -> AnyConfig:
    installed = fields["model_type"] in model_types()
    own = own_config(fields, model_class(fields["model_type"])) if installed else None
    return transformers_config(fields) if own is None else own


def _fields(file: GGUFFile) -> Fields:
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        if arch == "clip":
            raise ValueError(
                f"{file.path} holds a model's eyes alone (mmproj): name the file of its language model, "
                "and this one as mmproj"
            )
        supported = ", ".join(ARCHITECTURES)
        raise ValueError(f"{file.path}: GGUF architecture {arch!r} is not supported; supported: {supported}")
    if arch not in _MAY_HAVE_EXPERTS and field(file, "expert_count", 0):
        raise ValueError(f"{file.path}: mixture-of-experts GGUF files (expert_count > 0) of {arch} are not supported")
    for key, known in _ONLY.items():
        if key == "expert_weights_scale" and arch in SCALED_EXPERTS:
            continue
        if key == "attention.causal" and arch in _BOTH_WAYS:
            known = (False,)
        if (value := field(file, key, known[0])) not in known:
            raise ValueError(f"{file.path}: {key}={value} is not supported; {key}={known[0]} is")
    return ARCHITECTURES[arch](file)


def _llama(file: GGUFFile) -> Fields:
    if field(file, "expert_count", 0):
        return _mixtral(file)
    return dict(
        model_type="llama",
        **transformer(file),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


def _qwen2(file: GGUFFile) -> Fields:
    return dict(model_type="qwen2", **transformer(file))


def _qwen3(file: GGUFFile) -> Fields:
    return dict(model_type="qwen3", **transformer(file), attention_bias="blk.0.attn_q.bias" in file.tensors)


def _gemma2(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``gemma2``."""
    fields = transformer(file)
    return dict(
        model_type="gemma2",
        **fields,
        query_pre_attn_scalar=_query_scalar(fields, layers_of_27b=46),
        sliding_window=field(file, "attention.sliding_window"),
        attn_logit_softcapping=field(file, "attn_logit_softcapping"),
        final_logit_softcapping=field(file, "final_logit_softcapping"),
    )


def _gemma3(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``gemma3``.

    Files name neither the local layers' frequencies nor which layers are local, unless they differ from Google's.
    """
    fields = transformer(file)
    rope = {GLOBAL: fields.pop("rope_parameters"), LOCAL: _local_rope(file)}
    return dict(
        model_type="gemma3_text",
        **fields,
        query_pre_attn_scalar=_query_scalar(fields, layers_of_27b=62),
        sliding_window=field(file, "attention.sliding_window"),
        layer_types=types_of_layers(file, fields["num_hidden_layers"], every=6),
        rope_parameters=rope,
        final_logit_softcapping=file.metadata.get("gemma3.final_logit_softcapping"),
    )


def _gemma_embedding(file: GGUFFile) -> Fields:
    return _gemma3(file) | {"use_bidirectional_attention": True}


def _gemma4(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``gemma4``.

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
    return dict(
        model_type="gemma4_text",
        **fields,
        **_gemma4_experts(file),
        layer_types=types,
        per_layer_config={number: dict(global_heads) for number, kind in enumerate(types) if kind == GLOBAL},
        sliding_window=field(file, "attention.sliding_window"),
        rope_parameters={LOCAL: _local_rope(file), GLOBAL: _proportional_rope(file)},
        final_logit_softcapping=file.metadata.get("gemma4.final_logit_softcapping") or None,
        hidden_size_per_layer_input=own_inputs,
        num_kv_shared_layers=shared,
        use_double_wide_mlp=doubled,
        attention_k_eq_v=_values_are_keys(file, types, shared),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
    )


def _listed_layer_types(file: GGUFFile, layers: int) -> list[str]:
    """Return which layers slide, as Gemma 4's files list them; the last one must not."""
    slides = field(file, "attention.sliding_window_pattern")
    if not isinstance(slides, list) or len(slides) != layers or slides[-1]:
        raise ValueError(
            f"{file.path}: gemma4.attention.sliding_window_pattern={slides} must say of each of {layers} layers "
            "whether it slides, which the last one does not"
        )
    return [LOCAL if local else GLOBAL for local in slides]


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
    (of_global,) = found[GLOBAL]
    return next(iter(found.get(LOCAL, found[GLOBAL]))), of_global


def _values_are_keys(file: GGUFFile, types: list[str], shared: int) -> bool:
    """Return whether global layers that keep KV have no values of their own: all of them, or none."""
    keeping = range(len(types) - shared)
    without = {number for number in keeping if f"blk.{number}.attn_v.weight" not in file.tensors}
    if without and without != {number for number in keeping if types[number] == GLOBAL}:
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


def _mixtral(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``llama`` with experts."""
    return dict(
        model_type="mixtral",
        **transformer(file),
        num_local_experts=field(file, "expert_count"),
        num_experts_per_tok=field(file, "expert_used_count"),
        sliding_window=None,
    )


def _qwen3_moe(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``qwen3moe``, in which every layer has experts."""
    return dict(
        model_type="qwen3_moe",
        **transformer(file),
        moe_intermediate_size=field(file, "expert_feed_forward_length"),
        num_experts=field(file, "expert_count"),
        num_experts_per_tok=field(file, "expert_used_count"),
        norm_topk_prob=True,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
    )


def _qwen2_moe(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``qwen2moe``, in which every layer has experts and shares do not sum to one."""
    fields = whole_width(file)
    return dict(
        model_type="qwen2_moe",
        **fields,
        moe_intermediate_size=field(file, "expert_feed_forward_length"),
        shared_expert_intermediate_size=field(file, "expert_shared_feed_forward_length", fields["intermediate_size"]),
        num_experts=field(file, "expert_count"),
        num_experts_per_tok=field(file, "expert_used_count"),
        norm_topk_prob=False,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
    )


def _olmoe(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``olmoe``, in which shares do not sum to one."""
    return dict(
        model_type="olmoe",
        **whole_width(file),
        num_experts=field(file, "expert_count"),
        num_experts_per_tok=field(file, "expert_used_count"),
        norm_topk_prob=False,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
    )


def _olmo2(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``olmo2``, which OLMo 3 has too: its local layers rotate without scaling."""
    fields = whole_width(file) | {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    window = field(file, "attention.sliding_window", 0)
    if not window:
        return fields | {"model_type": "olmo2"}
    theta = fields["rope_parameters"]["rope_theta"]
    return fields | {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": types_of_layers(file, fields["num_hidden_layers"], every=4),
        "rope_parameters": {
            GLOBAL: fields["rope_parameters"],
            LOCAL: {"rope_theta": theta, "rope_type": "default"},
        },
    }


def _seed_oss(file: GGUFFile) -> Fields:
    return dict(
        model_type="seed_oss",
        **transformer(file),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
    )


def _llama4(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``llama4``.

    Metadata lacks the chunk, the growth of queries and which layers rotate: Meta's values are taken, as by llama.cpp,
    unless the file has the first two. Queries are normed except with 128 experts (Maverick).
    """
    fields: dict[str, Any] = transformer(file)
    layers, experts = fields["num_hidden_layers"], field(file, "expert_count")
    rotates = [int((number + 1) % 4 != 0) for number in range(layers)]
    return dict(
        model_type="llama4_text",
        **(fields | {"intermediate_size": field(file, "expert_feed_forward_length")}),
        intermediate_size_mlp=fields["intermediate_size"],
        num_local_experts=experts,
        num_experts_per_tok=field(file, "expert_used_count"),
        interleave_moe_layer_step=field(file, "interleave_moe_layer_step"),
        moe_layers=[number for number in range(layers) if f"blk.{number}.ffn_gate_inp.weight" in file.tensors],
        no_rope_layers=rotates,
        layer_types=["chunked_attention" if rotated else "full_attention" for rotated in rotates],
        attention_chunk_size=field(file, "attention.sliding_window", 8192),
        use_qk_norm=experts != 128,
        attn_temperature_tuning=True,
        floor_scale=field(file, "attention.temperature_length", 8192),
        attn_scale=field(file, "attention.temperature_scale", 0.1),
    )


def _gpt_oss(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``gpt-oss``: local and global layers in turn, the first one local."""
    fields: dict[str, Any] = transformer(file)
    layers = fields["num_hidden_layers"]
    return dict(
        model_type="gpt_oss",
        **(fields | {"intermediate_size": field(file, "expert_feed_forward_length")}),
        num_local_experts=field(file, "expert_count"),
        num_experts_per_tok=field(file, "expert_used_count"),
        sliding_window=field(file, "attention.sliding_window"),
        layer_types=[("sliding_attention", "full_attention")[number % 2] for number in range(layers)],
        attention_bias=True,
    )


ARCHITECTURES: dict[str, Callable[[GGUFFile], Fields]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2vl": _qwen2,  # text has one position in all axes of the rotation
    "qwen3": _qwen3,
    "qwen3vl": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "qwen3moe": _qwen3_moe,
    "qwen3vlmoe": _qwen3_moe,
    "qwen2moe": _qwen2_moe,
    "olmoe": _olmoe,
    "olmo2": _olmo2,
    "seed_oss": _seed_oss,
    "llama4": _llama4,
    "gpt-oss": _gpt_oss,
    "gemma-embedding": _gemma_embedding,
    **ENCODERS,
    **FAMILIES,
    **RECURRENT,
}
"""Maps an architecture to the function that makes the fields of its config."""
_MAY_HAVE_EXPERTS = (
    *("llama", "qwen2moe", "qwen3moe", "qwen3vlmoe", "olmoe", "llama4", "gpt-oss", "jamba", "gemma4"),
    *WITH_EXPERTS,
)

_BOTH_WAYS = ("gemma-embedding", *ENCODERS)
"""Architectures of encoders."""

_ONLY: dict[str, tuple[float | bool, ...]] = {"attention.causal": (True,), "expert_weights_scale": (1.0, 0.0)}
"""Keys with the only values that are supported, except the scale for `SCALED_EXPERTS`; llama.cpp writes 0 for an unused
scale."""
