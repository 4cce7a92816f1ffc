"""Makes the fields of configs from GGUF metadata for the families in `jpaged_models.families`, GPT-2, Granite 4,
Falcon-H1, LFM2-MoE, Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from jpaged.loading.gguf.fields import field, shortest, transformer
from jpaged.loading.gguf.reader import GGUFFile

Fields: TypeAlias = dict[str, Any]

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def whole_width(file: GGUFFile, **options: Any) -> Fields:
    """Return the fields of a transformer whose heads together are as wide as its hidden states.

    Args:
        options: see `transformer`.

    Raises:
        ValueError: they are not.
    """
    fields: Fields = transformer(file, **options)
    head_dim, embed = fields.pop("head_dim"), fields["hidden_size"]
    if head_dim * fields["num_attention_heads"] != embed:
        raise ValueError(f"{file.path}: attention.key_length={head_dim} is not embedding_length / head_count")
    return fields


def short_convolutions(file: GGUFFile) -> Fields:
    """Return the fields of LFM2; layers without KV heads are short convolutions."""
    fields = whole_width(file)
    eps = fields.pop("rms_norm_eps")
    heads = field(file, "attention.head_count_kv")
    by_layer = heads if isinstance(heads, list) else [heads] * fields["num_hidden_layers"]
    return fields | {
        "norm_eps": eps,
        "layer_types": [_GLOBAL if kv else "conv" for kv in by_layer],
        "conv_L_cache": field(file, "shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in file.tensors),
    }


def _has(file: GGUFFile, tensor: str) -> bool:
    return f"blk.0.{tensor}" in file.tensors


def _phi3(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``phi3``, whose long contexts have factors of frequencies in two tensors."""
    fields = whole_width(file, partial=True, rope_types=("longrope",))
    long, short = (f"rope_factors_{length}.weight" for length in ("long", "short"))
    if long in file.tensors:
        original = field(file, "rope.scaling.original_context_length")
        fields["original_max_position_embeddings"] = original
        fields["rope_parameters"] |= {
            "rope_type": "longrope",
            "long_factor": _numbers(file, long),
            "short_factor": _numbers(file, short),
            "original_max_position_embeddings": original,
        }
    return dict(model_type="phi3", **fields, sliding_window=field(file, "attention.sliding_window", 0) or None)


def _numbers(file: GGUFFile, name: str) -> list[float]:
    if name not in file.tensors:
        raise ValueError(f"{file.path} has no tensor {name}")
    return [shortest(value) for value in np.asarray(file.stored_rows(name), np.float32)]


def _gemma(file: GGUFFile) -> Fields:
    return dict(model_type="gemma", **transformer(file), attention_bias=_has(file, "attn_q.bias"))


def _granite(file: GGUFFile) -> Fields:
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
        attention_bias=_has(file, "attn_q.bias"),
        mlp_bias=_has(file, "ffn_up.bias"),
    )


def _granite_moe(file: GGUFFile) -> Fields:
    if _has(file, "ffn_gate_shexp.weight"):
        raise ValueError(f"{file.path}: granitemoe with a shared expert is not supported")
    fields = _granite(file)
    del fields["mlp_bias"]
    return fields | {
        "model_type": "granitemoe",
        "num_local_experts": field(file, "expert_count"),
        "num_experts_per_tok": field(file, "expert_used_count"),
    }


def _granite_hybrid(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``granitehybrid``; layers without KV heads are recurrent.

    Raises:
        ValueError: positions are known by rotation, as in Bamba, which has this architecture too.
    """
    if field(file, "rope.scaling.finetuned", False):
        raise ValueError(f"{file.path}: granitehybrid with rope.scaling.finetuned=True (Bamba) is not supported")
    fields = _granite(file)
    del fields["mlp_bias"]
    heads = field(file, "attention.head_count_kv")
    by_layer = heads if isinstance(heads, list) else [heads] * fields["num_hidden_layers"]
    state = _mamba2(file)
    return fields | {
        **state,
        "model_type": "granitemoehybrid",
        "layer_types": [_GLOBAL if kv else "linear_attention" for kv in by_layer],
        "attention_bias": any(name.endswith("attn_q.bias") for name in file.tensors),
        "num_local_experts": field(file, "expert_count", 0),
        "num_experts_per_tok": field(file, "expert_used_count", 0),
        "shared_intermediate_size": field(file, "expert_shared_feed_forward_length"),
        "mamba_expand": state["mamba_n_heads"] * state["mamba_d_head"] // fields["hidden_size"],
    }


def _mamba2(file: GGUFFile) -> Fields:
    """Return the fields of Mamba-2 in a model that attends too."""
    heads = field(file, "ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": field(file, "ssm.inner_size") // heads,
        "mamba_n_groups": field(file, "ssm.group_count"),
        "mamba_d_state": field(file, "ssm.state_size"),
        "mamba_d_conv": field(file, "ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in file.tensors),
    }


def _biases(file: GGUFFile) -> Fields:
    return {"attention_bias": _has(file, "attn_q.bias"), "mlp_bias": _has(file, "ffn_up.bias")}


def _smollm3(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``smollm3``; every fourth layer does not rotate, as llama.cpp has it."""
    return dict(
        model_type="smollm3",
        **whole_width(file),
        **_biases(file),
    )


def _starcoder2(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``starcoder2``; files do not tell its window, which llama.cpp does without."""
    fields = whole_width(file, eps="norm_epsilon")
    return dict(model_type="starcoder2", **fields, sliding_window=None, use_bias=_has(file, "attn_q.bias"))


def _stablelm(file: GGUFFile) -> Fields:
    if _has(file, "attn_q_norm.weight"):
        raise ValueError(f"{file.path}: stablelm with norms of heads (StableLM 2 12B) is not supported")
    return dict(
        model_type="stablelm",
        **whole_width(file, eps="layer_norm_eps", partial=True),
        use_qkv_bias=_has(file, "attn_q.bias"),
        use_parallel_residual=not _has(file, "ffn_norm.weight"),
    )


def _arcee(file: GGUFFile) -> Fields:
    return dict(model_type="arcee", **transformer(file), **_biases(file))


def _nemotron(file: GGUFFile) -> Fields:
    return dict(model_type="nemotron", **transformer(file, eps="norm_eps", partial=True), **_biases(file))


def _cohere(file: GGUFFile) -> Fields:
    return dict(
        model_type="cohere",
        **whole_width(file, eps="layer_norm_eps"),
        logit_scale=shortest(field(file, "logit_scale")),
        use_qk_norm=_has(file, "attn_q_norm.weight"),
        attention_bias=_has(file, "attn_q.bias"),
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
    layers = fields["num_hidden_layers"]
    window = field(file, "attention.sliding_window", 0) or None
    slides = field(file, "attention.sliding_window_pattern", [(n + 1) % 4 != 0 for n in range(layers)])
    kinds = [_LOCAL if window and local else _GLOBAL for local in slides]
    return dict(model_type="exaone4", **fields, sliding_window=window, layer_types=kinds)


def _hunyuan_dense(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``hunyuan-dense``; the file's base of frequencies is the scaled one."""
    return dict(model_type="hunyuan_v1_dense", **transformer(file), attention_bias=_has(file, "attn_q.bias"))


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


def _falcon_h1(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``falcon-h1``; the multipliers are in the file's matrices."""
    fields: Fields = transformer(file)
    state = _mamba2(file)
    return fields | {
        **state,
        **_biases(file),
        "model_type": "falcon_h1",
        "projectors_bias": state["mamba_proj_bias"],
        "mamba_d_ssm": field(file, "ssm.inner_size"),
        "mamba_rms_norm": _has(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # llama.cpp norms what was gated
    }


def _ernie4_5(file: GGUFFile) -> Fields:
    return dict(model_type="ernie4_5", **transformer(file), use_bias=_has(file, "attn_q.bias"))


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
    return dict(model_type="glm4", **transformer(file, partial=True), attention_bias=_has(file, "attn_q.bias"))


def _deepseek_experts(file: GGUFFile) -> Fields:
    """Return the fields of experts as DeepSeek-V3's, which are scored by sigmoids.

    Raises:
        ValueError: the file says that scores are made otherwise.
    """
    if (scored := field(file, "expert_gating_func", _SIGMOID)) != _SIGMOID:
        raise ValueError(f"{file.path}: expert_gating_func={scored} is not supported; {_SIGMOID} (sigmoid) is")
    return {
        "n_routed_experts": field(file, "expert_count"),
        "num_experts_per_tok": field(file, "expert_used_count"),
        "moe_intermediate_size": field(file, "expert_feed_forward_length"),
        "n_shared_experts": field(file, "expert_shared_count"),
        "first_k_dense_replace": field(file, "leading_dense_block_count"),
        "routed_scaling_factor": shortest(field(file, "expert_weights_scale", 1.0)),
        "norm_topk_prob": bool(field(file, "expert_weights_norm", False)),
        "n_group": field(file, "expert_group_count", 1),
        "topk_group": field(file, "expert_group_used_count", 1),
        "attention_bias": _has(file, "attn_q.bias"),
    }


_SIGMOID = 2
"""The value of ``expert_gating_func`` of scores that are sigmoids."""


def _glm4_moe(file: GGUFFile) -> Fields:
    return dict(
        model_type="glm4_moe",
        **transformer(file, partial=True),
        **_deepseek_experts(file),
        use_qk_norm=_has(file, "attn_q_norm.weight"),
    )


def _dots1(file: GGUFFile) -> Fields:
    return dict(model_type="dots1", **transformer(file), **_deepseek_experts(file), sliding_window=None)


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


def _lfm2_moe(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``lfm2moe``, in which shares sum to one."""
    return dict(
        model_type="lfm2_moe",
        **short_convolutions(file),
        num_dense_layers=field(file, "leading_dense_block_count"),
        num_experts=field(file, "expert_count"),
        num_experts_per_tok=field(file, "expert_used_count"),
        moe_intermediate_size=field(file, "expert_feed_forward_length"),
        norm_topk_prob=True,
        use_expert_bias=any(name.endswith("exp_probs_b.bias") for name in file.tensors),
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


def _delta_net(file: GGUFFile, **options: Any) -> Fields:
    """Return the fields that Qwen3-Next and Qwen3.5 share; every n-th layer attends."""
    fields: Fields = transformer(file, partial=True, **options)
    heads, every = field(file, "ssm.time_step_rank"), field(file, "full_attention_interval", 4)
    return fields | {
        "layer_types": [
            _GLOBAL if (n + 1) % every == 0 else "linear_attention" for n in range(fields["num_hidden_layers"])
        ],
        "linear_conv_kernel_dim": field(file, "ssm.conv_kernel"),
        "linear_key_head_dim": field(file, "ssm.state_size"),
        "linear_num_key_heads": field(file, "ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": field(file, "ssm.inner_size") // heads,
        "attention_bias": any(name.endswith("attn_q.bias") for name in file.tensors),
    }


def _shared_experts(file: GGUFFile) -> Fields:
    return {
        "num_experts": field(file, "expert_count"),
        "num_experts_per_tok": field(file, "expert_used_count"),
        "moe_intermediate_size": field(file, "expert_feed_forward_length"),
        "shared_expert_intermediate_size": field(file, "expert_shared_feed_forward_length"),
    }


def _qwen3_next(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``qwen3next``, in which every layer has experts and shares sum to one."""
    return dict(model_type="qwen3_next", **_delta_net(file), **_shared_experts(file), norm_topk_prob=True)


def _qwen3_5(file: GGUFFile) -> Fields:
    return dict(model_type="qwen3_5_text", **_delta_net(file))


def _qwen3_5_moe(file: GGUFFile) -> Fields:
    fields = _delta_net(file, has_mlp=False) | _shared_experts(file)
    del fields["intermediate_size"]
    return dict(model_type="qwen3_5_moe_text", **fields)


FAMILIES: dict[str, Callable[[GGUFFile], Fields]] = {
    "phi3": _phi3,
    "gemma": _gemma,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "granitehybrid": _granite_hybrid,
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
    "falcon-h1": _falcon_h1,
    "ernie4_5": _ernie4_5,
    "ernie4_5-moe": _ernie4_5_moe,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "dots1": _dots1,
    "minimax-m2": _minimax_m2,
    "lfm2moe": _lfm2_moe,
    "gpt2": _gpt2,
    "qwen3next": _qwen3_next,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5_moe,
}
"""Maps an architecture to the function that makes the fields of its config."""

WITH_EXPERTS: Sequence[str] = (
    *("granitemoe", "ernie4_5-moe", "glm4moe", "dots1", "minimax-m2", "lfm2moe"),
    *("qwen3next", "qwen35moe", "granitehybrid", "hunyuan-moe"),
)
SCALED_EXPERTS: Sequence[str] = ("glm4moe", "dots1")
"""Architectures that may multiply the shares of experts by a number."""
