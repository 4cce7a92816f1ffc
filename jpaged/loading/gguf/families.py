"""Makes the fields of configs from GGUF metadata for the families in `jpaged_models.families`, GPT-2 and DeepSeek."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from jpaged.loading.gguf.fields import (
    GLOBAL,
    LONG_FACTORS,
    SHORT_FACTORS,
    field,
    first_layer_has,
    rope_parameters,
    shortest,
    transformer,
    types_of_layers,
    whole_width,
)
from jpaged.loading.gguf.reader import GGUFFile

Fields: TypeAlias = dict[str, Any]


def _phi3(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``phi3``, whose long contexts have factors of frequencies in two tensors."""
    fields = whole_width(file, partial=True, rope_types=("longrope",))
    if LONG_FACTORS in file.tensors:
        original = field(file, "rope.scaling.original_context_length")
        fields["original_max_position_embeddings"] = original
        fields["rope_parameters"] |= {
            "rope_type": "longrope",
            "long_factor": _numbers(file, LONG_FACTORS),
            "short_factor": _numbers(file, SHORT_FACTORS),
            "original_max_position_embeddings": original,
        }
    return dict(model_type="phi3", **fields, sliding_window=field(file, "attention.sliding_window", 0) or None)


def _numbers(file: GGUFFile, name: str) -> list[float]:
    if name not in file.tensors:
        raise ValueError(f"{file.path} has no tensor {name}")
    return [shortest(value) for value in np.asarray(file.stored_rows(name), np.float32)]


def _gemma(file: GGUFFile) -> Fields:
    return dict(model_type="gemma", **transformer(file), attention_bias=first_layer_has(file, "attn_q.bias"))


def granite(file: GGUFFile) -> Fields:
    scales = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return dict(
        model_type="granite",
        **whole_width(file),
        **{name: shortest(field(file, key, 1.0)) for name, key in scales.items()},
        attention_bias=first_layer_has(file, "attn_q.bias"),
        mlp_bias=first_layer_has(file, "ffn_up.bias"),
    )


def _granite_moe(file: GGUFFile) -> Fields:
    if first_layer_has(file, "ffn_gate_shexp.weight"):
        raise ValueError(f"{file.path}: granitemoe with a shared expert is not supported")
    fields = granite(file)
    del fields["mlp_bias"]
    return fields | {
        "model_type": "granitemoe",
        "num_local_experts": field(file, "expert_count"),
        "num_experts_per_tok": field(file, "expert_used_count"),
    }


def biases(file: GGUFFile) -> Fields:
    return {"attention_bias": first_layer_has(file, "attn_q.bias"), "mlp_bias": first_layer_has(file, "ffn_up.bias")}


def _smollm3(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``smollm3``; every fourth layer does not rotate, as llama.cpp has it."""
    return dict(
        model_type="smollm3",
        **whole_width(file),
        **biases(file),
    )


def _starcoder2(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``starcoder2``; files do not tell its window, which llama.cpp does without."""
    fields = whole_width(file, eps="norm_epsilon")
    return dict(model_type="starcoder2", **fields, sliding_window=None, use_bias=first_layer_has(file, "attn_q.bias"))


def _stablelm(file: GGUFFile) -> Fields:
    if first_layer_has(file, "attn_q_norm.weight"):
        raise ValueError(f"{file.path}: stablelm with norms of heads (StableLM 2 12B) is not supported")
    return dict(
        model_type="stablelm",
        **whole_width(file, eps="layer_norm_eps", partial=True),
        use_qkv_bias=first_layer_has(file, "attn_q.bias"),
        use_parallel_residual=not first_layer_has(file, "ffn_norm.weight"),
    )


def _arcee(file: GGUFFile) -> Fields:
    return dict(model_type="arcee", **transformer(file), **biases(file))


def _nemotron(file: GGUFFile) -> Fields:
    return dict(model_type="nemotron", **transformer(file, eps="norm_eps", partial=True), **biases(file))


def _cohere(file: GGUFFile) -> Fields:
    return dict(
        model_type="cohere",
        **whole_width(file, eps="layer_norm_eps"),
        logit_scale=shortest(field(file, "logit_scale")),
        use_qk_norm=first_layer_has(file, "attn_q_norm.weight"),
        attention_bias=first_layer_has(file, "attn_q.bias"),
    )


def _cohere2(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``cohere2``; every fourth layer is global, as llama.cpp has it."""
    return dict(
        model_type="cohere2",
        **transformer(file, eps="layer_norm_eps"),
        logit_scale=shortest(field(file, "logit_scale")),
        sliding_window=field(file, "attention.sliding_window"),
    )


def _exaone4(file: GGUFFile) -> Fields:
    fields = whole_width(file)
    layers, window = fields["num_hidden_layers"], field(file, "attention.sliding_window", 0) or None
    kinds = types_of_layers(file, layers, every=4) if window else [GLOBAL] * layers
    return dict(model_type="exaone4", **fields, sliding_window=window, layer_types=kinds)


def _hunyuan_dense(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``hunyuan-dense``; the file's base of frequencies is the scaled one."""
    return dict(model_type="hunyuan_v1_dense", **transformer(file), attention_bias=first_layer_has(file, "attn_q.bias"))


def _hunyuan_moe(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``hunyuan-moe``, whose experts and shared expert are as wide.

    Raises:
        ValueError: they are not.
    """
    fields = _hunyuan_dense(file)
    width = fields["intermediate_size"]
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        if (own := field(file, key, width)) != width:
            raise ValueError(f"{file.path}: {key}={own} is not supported; only feed_forward_length={width}")
    experts = {"num_experts": field(file, "expert_count"), "moe_topk": field(file, "expert_used_count")}
    return fields | {"model_type": "hunyuan_v1_moe", **experts}


def _apertus(file: GGUFFile) -> Fields:
    return dict(model_type="apertus", **whole_width(file), attention_bias=first_layer_has(file, "attn_q.bias"))


def _mistral3(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``mistral3``: Ministral 3, whose queries grow with their position, or else
    Mistral."""
    fields: Fields = transformer(file)
    growth = field(file, "attention.temperature_scale", 0.0)
    if not growth:
        return dict(model_type="mistral", **fields, sliding_window=None)
    fields["rope_parameters"] |= {"llama_4_scaling_beta": shortest(growth)}
    return dict(model_type="ministral3", **fields)


def _gpt_neox(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``gptneox``; files do not tell the base of frequencies, which is 10,000."""
    fields = whole_width(file, eps="layer_norm_eps", partial=True)
    del fields["num_key_value_heads"]
    return dict(
        model_type="gpt_neox",
        **fields,
        use_parallel_residual=field(file, "use_parallel_residual", True),
        attention_bias=first_layer_has(file, "attn_qkv.bias"),
    )


def _phi2(file: GGUFFile) -> Fields:
    return dict(model_type="phi", **whole_width(file, eps="layer_norm_eps", partial=True))


def _ernie4_5(file: GGUFFile) -> Fields:
    return dict(model_type="ernie4_5", **transformer(file), use_bias=first_layer_has(file, "attn_q.bias"))


def _ernie4_5_moe(file: GGUFFile) -> Fields:
    fields = _ernie4_5(file)
    return fields | {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": field(file, "expert_count"),
        "moe_k": field(file, "expert_used_count"),
        "moe_intermediate_size": field(file, "expert_feed_forward_length"),
        "moe_num_shared_experts": field(file, "expert_shared_count", 0),
        "moe_layer_interval": field(file, "interleave_moe_layer_step", 1),
        "moe_layer_start_index": field(file, "leading_dense_block_count"),
        "moe_layer_end_index": fields["num_hidden_layers"] - 1,
    }


def _glm4(file: GGUFFile) -> Fields:
    return dict(
        model_type="glm4", **transformer(file, partial=True), attention_bias=first_layer_has(file, "attn_q.bias")
    )


def sigmoid_experts(file: GGUFFile, scored: Sequence[int] = (2,)) -> Fields:
    """Return the fields of experts that are chosen as DeepSeek-V3's.

    Args:
        scored: the ways to make scores that the family has, of those below; by default sigmoids.

    Raises:
        ValueError: the file says that scores are made otherwise.
    """
    if (found := field(file, "expert_gating_func", scored[0])) not in scored:
        known = " and ".join(f"{way} ({_SCORED[way]})" for way in scored)
        raise ValueError(f"{file.path}: expert_gating_func={found} is not supported; {known} is")
    return {
        "n_routed_experts": field(file, "expert_count"),
        "num_experts_per_tok": field(file, "expert_used_count"),
        "moe_intermediate_size": field(file, "expert_feed_forward_length"),
        "n_shared_experts": field(file, "expert_shared_count"),
        "routed_scaling_factor": shortest(field(file, "expert_weights_scale", 1.0)),
        "norm_topk_prob": bool(field(file, "expert_weights_norm", False)),
        "n_group": field(file, "expert_group_count", 1),
        "topk_group": field(file, "expert_group_used_count", 1),
    }


def _after_dense_layers(file: GGUFFile) -> Fields:
    """Return the fields of `sigmoid_experts` in all layers but the first ones."""
    return sigmoid_experts(file) | {
        "first_k_dense_replace": field(file, "leading_dense_block_count"),
        "attention_bias": first_layer_has(file, "attn_q.bias"),
    }


_SOFTMAX, _SIGMOID = 1, 2
"""Values of ``expert_gating_func``: what makes scores of logits."""
_SCORED = {_SOFTMAX: "softmax", _SIGMOID: "sigmoid"}


def _deepseek2(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``deepseek2``: DeepSeek-V2, or V3 and others whose experts are alike.

    Old files lack the sizes of a head after the latents are unfolded, as their heads have those sizes in the file. They
    also do not say how experts are scored: by sigmoids where a bias corrects the scores.

    Raises:
        ValueError: queries grow with their position, as in Mistral Large 3.
    """
    if growth := field(file, "attention.temperature_scale", 0.0):
        raise ValueError(f"{file.path}: deepseek2 with attention.temperature_scale={growth} is not supported")
    fields = transformer(file, rotates=False)
    whole = field(file, "attention.key_length_mla", fields.pop("head_dim"))
    rotated = field(file, "rope.dimension_count")
    if not 0 < rotated < whole:
        raise ValueError(f"{file.path}: rope.dimension_count={rotated} must be a part of a head of {whole}")
    fields |= {
        "num_key_value_heads": fields["num_attention_heads"],
        "q_lora_rank": field(file, "attention.q_lora_rank", 0) or None,
        "kv_lora_rank": field(file, "attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": whole - rotated,
        "v_head_dim": field(file, "attention.value_length_mla", field(file, "attention.value_length")),
        "rope_parameters": rope_parameters(file, shortest(field(file, "rope.freq_base", 10000.0)), rotated),
    }
    corrected = any(name.endswith("exp_probs_b.bias") for name in file.tensors)
    scored = field(file, "expert_gating_func", _SIGMOID if corrected else _SOFTMAX)
    experts = sigmoid_experts(file, scored=(_SIGMOID, _SOFTMAX)) | {
        "first_k_dense_replace": field(file, "leading_dense_block_count"),
        "attention_bias": first_layer_has(file, "attn_kv_a_mqa.bias"),
    }
    if scored == _SIGMOID:
        return dict(model_type="deepseek_v3", **fields, **experts, rope_interleave=True)
    method = "group_limited_greedy" if experts["n_group"] > 1 else "greedy"
    return dict(model_type="deepseek_v2", **fields, **experts, topk_method=method)


def _glm4_moe(file: GGUFFile) -> Fields:
    return dict(
        model_type="glm4_moe",
        **transformer(file, partial=True),
        **_after_dense_layers(file),
        use_qk_norm=first_layer_has(file, "attn_q_norm.weight"),
    )


def _dots1(file: GGUFFile) -> Fields:
    return dict(model_type="dots1", **transformer(file), **_after_dense_layers(file), sliding_window=None)


def _minimax_m2(file: GGUFFile) -> Fields:
    fields = transformer(file, partial=True)
    width = field(file, "expert_feed_forward_length", fields.pop("intermediate_size"))
    return dict(
        model_type="minimax_m2",
        **fields,
        intermediate_size=width,
        num_local_experts=field(file, "expert_count"),
        num_experts_per_tok=field(file, "expert_used_count"),
    )


def _gpt2(file: GGUFFile) -> Fields:
    fields = whole_width(file, eps="layer_norm_epsilon", rotates=False)
    names = {
        "vocab_size": "vocab_size",
        "n_positions": "max_position_embeddings",
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "layer_norm_epsilon": "layer_norm_epsilon",
        "bos_token_id": "bos_token_id",
        "eos_token_id": "eos_token_id",
        "pad_token_id": "pad_token_id",
    }
    return dict(model_type="gpt2", **{own: fields[name] for own, name in names.items()})


FAMILIES: dict[str, Callable[[GGUFFile], Fields]] = {
    "phi3": _phi3,
    "gemma": _gemma,
    "granite": granite,
    "granitemoe": _granite_moe,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
    "stablelm": _stablelm,
    "arcee": _arcee,
    "nemotron": _nemotron,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "exaone4": _exaone4,
    "hunyuan-dense": _hunyuan_dense,
    "hunyuan-moe": _hunyuan_moe,
    "apertus": _apertus,
    "mistral3": _mistral3,
    "gptneox": _gpt_neox,
    "phi2": _phi2,
    "deepseek2": _deepseek2,
    "ernie4_5": _ernie4_5,
    "ernie4_5-moe": _ernie4_5_moe,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "dots1": _dots1,
    "minimax-m2": _minimax_m2,
    "gpt2": _gpt2,
}
"""Maps an architecture to the function that makes the fields of its config."""

WITH_EXPERTS: Sequence[str] = (
    *("granitemoe", "ernie4_5-moe", "glm4moe", "dots1", "minimax-m2", "lfm2moe"),
    *("qwen3next", "qwen35moe", "granitehybrid", "hunyuan-moe", "nemotron_h_moe", "deepseek2"),
)
SCALED_EXPERTS: Sequence[str] = ("glm4moe", "dots1", "nemotron_h_moe", "deepseek2")
"""Architectures that may multiply the shares of experts by a number."""
