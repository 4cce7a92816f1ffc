"""Makes the fields of configs from GGUF metadata for models with recurrent layers, most of which attend too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jpaged.loading.gguf.families import Fields, biases, granite, sigmoid_experts
from jpaged.loading.gguf.fields import GLOBAL, every_model, field, first_layer_has, shortest, transformer, whole_width
from jpaged.loading.gguf.reader import GGUFFile


def _mamba2(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``mamba2``."""
    fields = every_model(file)
    del fields["max_position_embeddings"]  # a state has no limit
    inner, heads = field(file, "ssm.inner_size"), field(file, "ssm.time_step_rank")
    return dict(
        model_type="mamba2",
        **fields,
        expand=inner // fields["hidden_size"],
        num_heads=heads,
        head_dim=inner // heads,
        state_size=field(file, "ssm.state_size"),
        n_groups=field(file, "ssm.group_count"),
        conv_kernel=field(file, "ssm.conv_kernel"),
        use_conv_bias="blk.0.ssm_conv1d.bias" in file.tensors,
        use_bias="blk.0.ssm_in.bias" in file.tensors,
        layer_norm_epsilon=shortest(field(file, "attention.layer_norm_rms_epsilon")),
    )


def _mamba2_with_attention(file: GGUFFile) -> Fields:
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


def _jamba(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``jamba``; the tensors say which layers attend and which have experts."""
    fields: dict[str, Any] = transformer(file, rotates=False)
    del fields["head_dim"]
    layers = range(fields["num_hidden_layers"])
    attends = [number for number in layers if f"blk.{number}.attn_q.weight" in file.tensors]
    mixed = [number for number in layers if f"blk.{number}.ffn_gate_inp.weight" in file.tensors]
    attention, experts = _every(file, attends, len(layers)), _every(file, mixed, len(layers))
    return dict(
        model_type="jamba",
        **fields,
        attn_layer_period=attention[0],
        attn_layer_offset=attention[1],
        expert_layer_period=experts[0],
        expert_layer_offset=experts[1],
        num_experts=field(file, "expert_count", 0) or 1,
        num_experts_per_tok=field(file, "expert_used_count", 0) or 1,
        mamba_d_state=field(file, "ssm.state_size"),
        mamba_d_conv=field(file, "ssm.conv_kernel"),
        mamba_expand=field(file, "ssm.inner_size") // fields["hidden_size"],
        mamba_dt_rank=field(file, "ssm.time_step_rank"),
        mamba_conv_bias=any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
        mamba_proj_bias=any(name.endswith("ssm_in.bias") for name in file.tensors),
    )


def _every(file: GGUFFile, numbers: Sequence[int], layers: int) -> tuple[int, int]:
    """Return the period and offset of the layers with these numbers; without numbers, a period longer than the
    model."""
    if not numbers:
        return layers + 1, layers
    period = numbers[1] - numbers[0] if len(numbers) > 1 else max(layers - numbers[0], numbers[0] + 1)
    if list(numbers) != list(range(numbers[0], layers, period)) or numbers[0] >= period:
        raise ValueError(f"{file.path}: layers {list(numbers)} of {layers} are not every n-th one; not supported")
    return period, numbers[0]


def _short_convolutions(file: GGUFFile) -> Fields:
    """Return the fields of LFM2; layers without KV heads are short convolutions."""
    fields = whole_width(file)
    eps = fields.pop("rms_norm_eps")
    heads = field(file, "attention.head_count_kv")
    by_layer = heads if isinstance(heads, list) else [heads] * fields["num_hidden_layers"]
    return fields | {
        "norm_eps": eps,
        "layer_types": [GLOBAL if kv else "conv" for kv in by_layer],
        "conv_L_cache": field(file, "shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in file.tensors),
    }


def _lfm2(file: GGUFFile) -> Fields:
    return dict(model_type="lfm2", **_short_convolutions(file), block_auto_adjust_ff_dim=False)


def _lfm2_moe(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``lfm2moe``, in which shares sum to one."""
    return dict(
        model_type="lfm2_moe",
        **_short_convolutions(file),
        num_dense_layers=field(file, "leading_dense_block_count"),
        num_experts=field(file, "expert_count"),
        num_experts_per_tok=field(file, "expert_used_count"),
        moe_intermediate_size=field(file, "expert_feed_forward_length"),
        norm_topk_prob=True,
        use_expert_bias=any(name.endswith("exp_probs_b.bias") for name in file.tensors),
    )


def _granite_hybrid(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``granitehybrid``; layers without KV heads are recurrent.

    Raises:
        ValueError: positions are known by rotation, as in Bamba, which has this architecture too.
    """
    if field(file, "rope.scaling.finetuned", False):
        raise ValueError(f"{file.path}: granitehybrid with rope.scaling.finetuned=True (Bamba) is not supported")
    fields = granite(file)
    del fields["mlp_bias"]
    heads = field(file, "attention.head_count_kv")
    by_layer = heads if isinstance(heads, list) else [heads] * fields["num_hidden_layers"]
    state = _mamba2_with_attention(file)
    return fields | {
        **state,
        "model_type": "granitemoehybrid",
        "layer_types": [GLOBAL if kv else "linear_attention" for kv in by_layer],
        "attention_bias": any(name.endswith("attn_q.bias") for name in file.tensors),
        "num_local_experts": field(file, "expert_count", 0),
        "num_experts_per_tok": field(file, "expert_used_count", 0),
        "shared_intermediate_size": field(file, "expert_shared_feed_forward_length"),
        "mamba_expand": state["mamba_n_heads"] * state["mamba_d_head"] // fields["hidden_size"],
    }


def _falcon_h1(file: GGUFFile) -> Fields:
    """Return the fields of architecture ``falcon-h1``; the multipliers are in the file's matrices."""
    fields: Fields = transformer(file)
    state = _mamba2_with_attention(file)
    return fields | {
        **state,
        **biases(file),
        "model_type": "falcon_h1",
        "projectors_bias": state["mamba_proj_bias"],
        "mamba_d_ssm": field(file, "ssm.inner_size"),
        "mamba_rms_norm": first_layer_has(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # llama.cpp norms what was gated
    }


def _nemotron_h(file: GGUFFile) -> Fields:
    """Return the fields of architectures ``nemotron_h`` and ``nemotron_h_moe``; the tensors say what each layer is.

    Raises:
        ValueError: a layer has none of the tensors by which its kind is known.
    """
    fields: Fields = transformer(file, rotates=False)
    layers = range(fields.pop("num_hidden_layers"))
    del fields["intermediate_size"]  # the file has each layer's own: that of MLPs, or of experts
    state = _mamba2_with_attention(file)
    found = fields | {
        "model_type": "nemotron_h",
        "layers_block_type": [_kind_of_block(file, number) for number in layers],
        "layer_norm_epsilon": fields.pop("rms_norm_eps"),
        "mamba_num_heads": state["mamba_n_heads"],
        "mamba_head_dim": state["mamba_d_head"],
        "n_groups": state["mamba_n_groups"],
        "ssm_state_size": state["mamba_d_state"],
        "conv_kernel": state["mamba_d_conv"],
        "use_conv_bias": state["mamba_conv_bias"],
        "use_bias": state["mamba_proj_bias"],
        "mlp_bias": any(name.endswith(("ffn_up.bias", "ffn_up_shexp.bias")) for name in file.tensors),
    }
    if file.metadata["general.architecture"] == "nemotron_h_moe":
        found |= sigmoid_experts(file) | {
            "moe_shared_expert_intermediate_size": field(file, "expert_shared_feed_forward_length"),
            "moe_latent_size": field(file, "moe_latent_size", 0) or None,
        }
    mlps = [number for number, kind in enumerate(found["layers_block_type"]) if kind == "mlp"]
    if mlps:
        found["intermediate_size"] = file.tensors[f"blk.{mlps[0]}.ffn_up.weight"].shape[0]
    return found


def _kind_of_block(file: GGUFFile, number: int) -> str:
    for tensor, kind in _KINDS_OF_BLOCKS.items():
        if f"blk.{number}.{tensor}.weight" in file.tensors:
            return kind
    raise ValueError(f"{file.path}: blk.{number} has none of {', '.join(_KINDS_OF_BLOCKS)}: its kind is not known")


_KINDS_OF_BLOCKS = {"ssm_in": "linear_attention", "attn_q": GLOBAL, "ffn_gate_inp": "moe", "ffn_up": "mlp"}
"""Maps a tensor that a layer of Nemotron-H has to the layer's kind."""


def _delta_net(file: GGUFFile, **options: Any) -> Fields:
    """Return the fields that Qwen3-Next and Qwen3.5 share; every n-th layer attends."""
    fields: Fields = transformer(file, partial=True, **options)
    heads, every = field(file, "ssm.time_step_rank"), field(file, "full_attention_interval", 4)
    return fields | {
        "layer_types": [
            GLOBAL if (n + 1) % every == 0 else "linear_attention" for n in range(fields["num_hidden_layers"])
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


RECURRENT: dict[str, Callable[[GGUFFile], Fields]] = {
    "mamba2": _mamba2,
    "jamba": _jamba,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "granitehybrid": _granite_hybrid,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen3next": _qwen3_next,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5_moe,
}
"""Maps an architecture to the function that makes the fields of its config."""
