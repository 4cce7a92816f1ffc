"""Holds the names that llama.cpp's converter gives tensors, architecture by architecture, and how to undo its changes.

The file is long because it is one table; the module `names` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from jpaged.loading.gguf.reader import GGUFFile

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class Names:
    """Holds an architecture's names: maps a stem in the file (or stem and kind) to the checkpoint's name.

    Attributes:
        outer: names of tensors outside of the layers.
        layer: names within a layer.
        prefix: beginning of a layer's names in the checkpoint.
        experts: maps stems of experts' tensors to one expert's name, with its number as ``{}``.
        fused: beginning of the names of the checkpoint's experts, if they are fused.
        alternating, outputs_first: see there.
        undo: maps stem and kind to the function in `Stored.undo` of the module `names`.
        joined: maps stem and kind to those of another tensor, with which it is one of the checkpoint's.
        split: maps stems to the checkpoint's names of the parts whose rows a tensor has one after another.
    """

    layer: Mapping[str, str]
    outer: Mapping[str, str] = field(default_factory=lambda: _OUTER)
    prefix: str = "model.layers"
    experts: Mapping[str, str] = field(default_factory=dict)
    fused: str | None = None
    alternating: bool = False
    outputs_first: bool = False
    undo: Mapping[str, Callable[..., np.ndarray]] = field(default_factory=dict)
    joined: Mapping[str, str] = field(default_factory=dict)
    split: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


def _mlp(block: str, suffix: str = "") -> dict[str, str]:
    return {f"ffn_{part}{suffix}": f"{block}.{part}_proj" for part in ("gate", "up", "down")}


def _one_expert(block: str) -> dict[str, str]:
    return {f"ffn_{part}_exps": f"{block}.{{}}.{part}_proj" for part in ("gate", "up", "down")}


_LAYER = {
    "attn_norm": "input_layernorm",
    **_ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    **_mlp("mlp"),
}

_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_MAMBA = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt": "dt_proj",
    "ssm_x": "x_proj",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_out": "out_proj",
}


def _within(block: str, names: Mapping[str, str]) -> dict[str, str]:
    return {stem: f"{block}.{name}" for stem, name in names.items()}


def _with_channel_axis(taps: np.ndarray) -> np.ndarray:
    """Turn a depthwise convolution's [channels, taps] into PyTorch's [channels, 1, taps]."""
    return taps[:, None, :]


def _flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1)


def _log_of_decay(decay: np.ndarray) -> np.ndarray:
    """Return the checkpoint's value ``A_log`` of the decay ``-exp(A_log)``."""
    return np.log(-decay)


def _minus_one(weight: np.ndarray) -> np.ndarray:
    return weight - 1


_NORMS = ("attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "output_norm")
_GEMMA = Names(_GEMMA_LAYER, undo={f"{norm}.weight": _minus_one for norm in _NORMS})

_SPARSE = Names(_LAYER | {"ffn_gate_inp": "mlp.gate"}, experts=_one_expert("mlp.experts"))

_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_PLAIN_MLP = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_SHARED = {**_SPARSE.layer, **_mlp("mlp.shared_experts", "_shexp")}
_CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_LFM2 = {
    **_ATTENTION,
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_LFM2_OUTER = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}


_ENCODER_OUTER = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}


def _one_above_another(*weights: np.ndarray) -> np.ndarray:
    return np.concatenate(weights)


_GATES_AND_UPS = {"ffn_gate.weight": "ffn_up.weight", "ffn_gate_shexp.weight": "ffn_up_shexp.weight"}
_MAMBA2_UNDO: Mapping[str, Callable[..., np.ndarray]] = {
    "ssm_conv1d.weight": _with_channel_axis,
    "ssm_a": lambda decay: _log_of_decay(_flat(decay)),
    "ssm_d": _flat,
    "ssm_norm.weight": _flat,
}


def _unchanged(weight: np.ndarray) -> np.ndarray:
    """Return norms of several heads, which are no matrix to multiply with, as an array."""
    return weight


def _turned(weight: np.ndarray) -> np.ndarray:
    """Turn [outputs, inputs] into the [inputs, outputs] of GPT-2's layers."""
    return weight.T


def _keys_and_values(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return, for each head in turn, the rows that unfold its keys, [heads, latents, size] in the file, and its values,
    [heads, size, latents]."""
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[2])


_MAMBA2_OUTER = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_MAMBA2 = {**_MAMBA, "ssm_dt.bias": "dt_bias", "ssm_norm": "norm"}
_NEMOTRON_H = Names(
    {
        "attn_norm": "norm",
        **_within("mixer", _MAMBA2),
        **{f"attn_{part}": f"mixer.{part[0]}_proj" for part in ("q", "k", "v", "output")},
        **{f"ffn_{part}": f"mixer.{part}_proj" for part in ("up", "down")},
        **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    },
    _MAMBA2_OUTER,
    "backbone.layers",
    experts=_one_expert("mixer.experts"),
    undo=_MAMBA2_UNDO,
)


_BY_ARCHITECTURE: dict[str, Names] = {
    "llama": _SPARSE,
    "bert": Names(
        {
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        _ENCODER_OUTER,
        "encoder.layer",
    ),
    "nomic-bert": Names(
        {
            "attn_output": "self_attn.o_proj",
            "attn_output_norm": "post_attention_layernorm",
            **_mlp("mlp"),
            "layer_output_norm": "post_mlp_layernorm",
        },
        _ENCODER_OUTER,
        "layers",
        split={"attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
    ),
    "modern-bert": Names(
        {
            "attn_norm": "attn_norm",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "ffn_norm": "mlp_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
        },
        {
            "token_embd": "embeddings.tok_embeddings",
            "token_embd_norm": "embeddings.norm",
            "output_norm": "final_norm",
        },
        "layers",
    ),
    "apertus": Names(_LAYER | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}),
    "gptneox": Names(
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
        "gpt_neox.layers",
    ),
    "phi2": Names(
        {**_ATTENTION, "attn_output": "self_attn.dense", "attn_norm": "input_layernorm"}
        | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        _OUTER | {"output_norm": "model.final_layernorm"},
        split={"attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
    ),
    "deepseek2": Names(
        _SHARED
        | _CORRECTION
        | {
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            **dict.fromkeys(("attn_kv_b", "attn_k_b"), "self_attn.kv_b_proj"),
        },
        experts=_SPARSE.experts,
        undo={"attn_k_b.weight": _keys_and_values},
        joined={"attn_k_b.weight": "attn_v_b.weight"},
    ),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON_H),
    "phi3": Names({**_LAYER, "attn_qkv": "self_attn.qkv_proj", **_FUSED_MLP}),
    "starcoder2": Names(_LAYER | _PLAIN_MLP),
    "exaone4": Names({**_ATTENTION, **_mlp("mlp"), **_POST_NORMS}),
    "hunyuan-dense": Names(
        _LAYER | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
    ),
    "glm4": Names(
        {**_LAYER, **_FUSED_MLP}
        | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
    ),
    "granitemoe": Names(_LAYER | {"ffn_gate_inp": "mlp.router"}, experts=_SPARSE.experts),
    "minimax-m2": Names({**_SPARSE.layer, "exp_probs_b.bias": "mlp.e_score_correction_bias"}, experts=_SPARSE.experts),
    "glm4moe": Names(
        _SHARED | _CORRECTION | {"post_attention_norm": "post_attention_layernorm"}, experts=_SPARSE.experts
    ),
    "dots1": Names(_SHARED | _CORRECTION, experts=_SPARSE.experts),
    "ernie4_5-moe": Names(
        _SHARED | {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        experts=_SPARSE.experts,
        undo={"exp_probs_b.bias": lambda bias: bias.reshape(1, -1)},
    ),
    "command-r": Names(_LAYER, undo=dict.fromkeys(("attn_q_norm.weight", "attn_k_norm.weight"), _unchanged)),
    "gpt2": Names(
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            **_PLAIN_MLP,
        },
        {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f"},
        "transformer.h",
        undo={f"{stem}.weight": _turned for stem in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")},
    ),
    "qwen3moe": _SPARSE,
    "qwen3vlmoe": _SPARSE,
    "nemotron": Names(_LAYER, undo={f"{norm}.weight": _minus_one for norm in ("attn_norm", "ffn_norm", "output_norm")}),
    "olmoe": _SPARSE,
    "qwen2moe": Names(
        {
            **_SPARSE.layer,
            **_mlp("mlp.shared_expert", "_shexp"),
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        },
        experts=_SPARSE.experts,
        undo={"ffn_gate_inp_shexp.weight": lambda weight: weight.reshape(1, -1)},
    ),
    "olmo2": Names(
        {
            **_ATTENTION,
            **_mlp("mlp"),
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    ),
    "seed_oss": Names(_LAYER | {"post_attention_norm": "post_attention_layernorm"}),
    "gemma": Names(_LAYER, undo=_GEMMA.undo),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma-embedding": _GEMMA,
    "gemma4": Names(
        _GEMMA_LAYER
        | {
            "layer_output_scale.weight": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        _OUTER
        | {
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        fused="experts",
        outputs_first=True,
    ),
    "llama4": Names(
        _LAYER
        | _mlp("feed_forward")
        | _mlp("feed_forward.shared_expert", "_shexp")
        | {"ffn_gate_inp": "feed_forward.router"},
        fused="feed_forward.experts",
    ),
    "gpt-oss": Names(
        _LAYER
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "attn_sinks.weight": "self_attn.sinks",
        },
        fused="mlp.experts",
        alternating=True,
    ),
    "mamba2": Names(
        {"attn_norm": "norm", **_within("mixer", _MAMBA2)},
        _MAMBA2_OUTER,
        "backbone.layers",
        undo=_MAMBA2_UNDO,
    ),
    "granitehybrid": Names(
        {
            **_LAYER,
            **_within("mamba", _MAMBA2),
            "ffn_gate_inp": "mlp.router",
            **dict.fromkeys(("ffn_gate", "ffn_gate_shexp"), "shared_mlp.input_linear"),
            **dict.fromkeys(("ffn_down", "ffn_down_shexp"), "shared_mlp.output_linear"),
        },
        experts=_SPARSE.experts,
        undo={**_MAMBA2_UNDO, **dict.fromkeys(_GATES_AND_UPS, _one_above_another)},
        joined=_GATES_AND_UPS,
    ),
    "falcon-h1": Names(
        {
            **_LAYER,
            **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight"),  # llama.cpp writes the former
            **_mlp("feed_forward"),
            **_within("mamba", _MAMBA2),
        },
        _OUTER | {"output_norm": "model.final_layernorm"},
        undo=_MAMBA2_UNDO,
    ),
    "hunyuan-moe": Names(
        {
            **_SPARSE.layer,
            **_mlp("mlp.shared_mlp", "_shexp"),
            "ffn_gate_inp": "mlp.gate.wg",
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        experts=_SPARSE.experts,
    ),
    "jamba": Names(
        {
            **_LAYER,
            "ffn_norm": "pre_ff_layernorm",
            **_mlp("feed_forward"),
            "ffn_gate_inp": "feed_forward.router",
            **_within("mamba", _MAMBA),
            **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
        },
        _OUTER | {"output_norm": "model.final_layernorm"},
        experts=_one_expert("feed_forward.experts"),
        undo={"ssm_conv1d.weight": _with_channel_axis, "ssm_a": _log_of_decay, "ssm_d": _flat},
    ),
    "lfm2": Names(_LFM2, _LFM2_OUTER, undo={"shortconv.conv.weight": _with_channel_axis}),
    "lfm2moe": Names(
        _LFM2 | {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias"},
        _LFM2_OUTER,
        experts=_one_expert("feed_forward.experts"),
        undo={"shortconv.conv.weight": _with_channel_axis},
    ),
}
_OTHERS = Names(_LAYER)

_DELTA = {
    **_BY_ARCHITECTURE["qwen2moe"].layer,
    "post_attention_norm": "post_attention_layernorm",
    **_within(
        "linear_attn",
        {
            "attn_qkv": "in_proj_qkv",
            "attn_gate": "in_proj_z",
            "ssm_alpha": "in_proj_a",
            "ssm_beta": "in_proj_b",
            "ssm_ba": "in_proj_ba",
            "ssm_in": "in_proj_qkvz",
            "ssm_conv1d": "conv1d",
            "ssm_a": "A_log",
            "ssm_dt.bias": "dt_bias",
            "ssm_norm": "norm",
            "ssm_out": "out_proj",
        },
    ),
}


@dataclass(frozen=True)
class _DeltaHeads:
    """Sizes of Gated DeltaNet, whose value heads llama.cpp's converter reorders for Qwen3.5: the first one of each key
    head, then the second one of each, instead of all of a key head after another.

    Attributes:
        keys, per_key: numbers of key heads, and of value heads for each.
        key_dim, value_dim: sizes of a head.
    """

    keys: int
    per_key: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, file: GGUFFile) -> _DeltaHeads:
        arch = file.metadata["general.architecture"]
        names = ("group_count", "time_step_rank", "state_size", "inner_size")
        keys, values, key_dim, width = (int(file.metadata[f"{arch}.ssm.{name}"]) for name in names)
        return cls(keys, values // keys, key_dim, width // values)

    def by_key(self, values: np.ndarray, size: int = 1, axis: int = 0) -> np.ndarray:
        """Put value heads of `size` numbers each in the checkpoint's order, along one axis."""
        shape = values.shape
        parts = values.reshape(*shape[:axis], self.per_key, self.keys, size, *shape[axis + 1 :])
        return parts.swapaxes(axis, axis + 1).reshape(shape)

    def after_queries_and_keys(self, rows: np.ndarray) -> np.ndarray:
        """Do so with the values of queries, keys and values."""
        cut = 2 * self.keys * self.key_dim
        return np.concatenate([rows[:cut], self.by_key(rows[cut:], self.value_dim)])

    def fused(self, qkv: np.ndarray, gates: np.ndarray) -> np.ndarray:
        """Join rows of queries, keys and values, and of gates, to those of each key head in turn, as Qwen3-Next's."""
        width = self.keys * self.key_dim
        parts = (*np.split(qkv, [width, 2 * width]), gates)
        by_head = [part.reshape(self.keys, -1, part.shape[1]) for part in parts]
        return np.concatenate(by_head, 1).reshape(-1, qkv.shape[1])


def _delta_net(file: GGUFFile) -> Names:
    """Return the names of Qwen3-Next and Qwen3.5."""
    undo: dict[str, Callable[..., np.ndarray]] = {
        **{norm: undone for norm, undone in _GEMMA.undo.items() if "ffw" not in norm},
        "ffn_gate_inp_shexp.weight": lambda weight: weight.reshape(1, -1),
        "ssm_a": _log_of_decay,
        "ssm_conv1d.weight": _with_channel_axis,
    }
    heads = _DeltaHeads.of(file)
    if file.metadata["general.architecture"] == "qwen3next":
        both = {"attn_qkv.weight": "linear_attn.in_proj_qkvz.weight"}
        undo["attn_qkv.weight"] = heads.fused
        joined = {"attn_qkv.weight": "attn_gate.weight"}
        return Names(_DELTA | both, experts=_SPARSE.experts, undo=undo, joined=joined)
    if heads.per_key > 1:
        undo |= {
            "attn_qkv.weight": heads.after_queries_and_keys,
            "attn_gate.weight": lambda rows: heads.by_key(rows, heads.value_dim),
            "ssm_alpha.weight": heads.by_key,
            "ssm_beta.weight": heads.by_key,
            "ssm_a": lambda decay: heads.by_key(_log_of_decay(decay)),
            "ssm_dt.bias": heads.by_key,
            "ssm_conv1d.weight": lambda taps: _with_channel_axis(heads.after_queries_and_keys(taps)),
            "ssm_out.weight": lambda columns: heads.by_key(columns, heads.value_dim, axis=1),
        }
    return Names(_DELTA, experts=_SPARSE.experts, undo=undo)


_BY_FILE = dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _delta_net)
"""Maps an architecture whose sizes matter to the function that makes its names."""


def names_of(file: GGUFFile) -> Names:
    """Return the names of the file's architecture; Llama's where it has none of its own."""
    arch = file.metadata["general.architecture"]
    return _BY_FILE[arch](file) if arch in _BY_FILE else _BY_ARCHITECTURE.get(arch, _OTHERS)
