"""Writes a Hugging Face checkpoint as GGUF: tensors named by the gguf package, values changed as llama.cpp does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants
from gguf_files import write_gguf
from transformers import PretrainedConfig

from jpaged.loading.safetensors_reader import SafetensorsWeights

ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "mixtral": "llama",
    "llama": "llama",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "olmoe": "olmoe",
    "olmo2": "olmo2",
    "seed_oss": "seed_oss",
    "llama4_text": "llama4",
    "gpt_oss": "gpt-oss",
    "mamba2": "mamba2",
    "jamba": "jamba",
    "lfm2": "lfm2",
    "phi3": "phi3",
    "gemma": "gemma",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "smollm3": "smollm3",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "arcee": "arcee",
    "falcon_h1": "falcon-h1",
    "hunyuan_v1_moe": "hunyuan-moe",
    "nemotron": "nemotron",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "exaone4": "exaone4",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "dots1": "dots1",
    "minimax_m2": "minimax-m2",
    "lfm2_moe": "lfm2moe",
    "gpt2": "gpt2",
    "apertus": "apertus",
    "gpt_neox": "gptneox",
    "ministral3": "mistral3",
    "mistral": "mistral3",
    "phi": "phi2",
    "olmo3": "olmo2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "granitemoehybrid": "granitehybrid",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
"""Hugging Face's ``model_type`` -> GGUF's architecture."""
WITH_TOWERS = {"qwen3_vl_text": "qwen3vl", "qwen3_vl_moe_text": "qwen3vlmoe", "gemma4_unified_text": "gemma4"}
"""The same of text models that are read as such with a tower only."""


def write_checkpoint(
    path: Path,
    folder: Path,
    config: PretrainedConfig,
    experts: GGMLQuantizationType | None = None,
    vocabulary: dict[str, Any] | None = None,
) -> Path:
    """Write the checkpoint in `folder`; experts' matrices in the encoding `experts`, everything else as it is.

    `vocabulary` are the keys of a tokenizer, without which the file can be read but not run.
    """
    arch = architecture(config)
    reader = SafetensorsWeights(folder)
    tensors: dict[str, Any] = {}
    numbers: dict[str, dict[int, float]] = {}
    for name, array in _converted({name: np.asarray(reader.read(name)) for name in reader.names()}, config).items():
        if ".act_fn." in name:  # Apertus' numbers are keys: a list of the layers' own
            numbers.setdefault(f"xielu.{name.rpartition('.')[2]}", {})[int(name.split(".")[2])] = float(array.item())
            continue
        stored = _gguf_name(name, arch, config.num_hidden_layers)
        quantised = experts is not None and stored.endswith("_exps.weight")
        tensors[stored] = (quants.quantize(array, experts), experts) if quantised else np.ascontiguousarray(array)
    if arch == "gemma4":
        tensors["rope_freqs.weight"] = _divisors(config)
    if arch == "phi3" and config.rope_parameters["rope_type"] == "longrope":
        for length in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{length}_factor"], np.float32)
            tensors[f"rope_factors_{length}.weight"] = factors
    if arch == "apertus":
        tensors["rope_freqs.weight"] = _llama3_divisors(config)
    keys = _metadata(arch, config) | {key: [by[n] for n in sorted(by)] for key, by in numbers.items()}
    return write_gguf(path, arch, tensors, keys | (vocabulary or {}), **dict.fromkeys(_SIZES))


def architecture(config: PretrainedConfig) -> str:
    """Return GGUF's name of the config's architecture."""
    if config.model_type == "nemotron_h":
        return "nemotron_h_moe" if "moe" in config.layers_block_type else "nemotron_h"
    return (ARCHITECTURES | WITH_TOWERS)[config.model_type]


_IN_PAIRS = (
    "mixtral",
    "llama",
    "arcee",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "smollm3",
    "ministral3",
    "mistral",
)
"""Families that the converter rotates by neighbours."""
_MAMBA2 = ("mamba2", "granitemoehybrid", "falcon_h1", "nemotron_h")

_SIZES = (
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
)
"""What `write_gguf` would write of its own."""


def _gguf_name(name: str, arch: str, layers: int) -> str:
    kind = next(kind for kind, said in gguf.MODEL_ARCH_NAMES.items() if said == arch)
    found = gguf.get_tensor_name_map(kind, layers).get_name(name, try_suffixes=(".weight", ".bias", ".scale"))
    assert found is not None, name
    return found


def _converted(tensors: dict[str, np.ndarray], config: PretrainedConfig) -> dict[str, np.ndarray]:
    """Return the tensors with the names and values that the converter gives the package to rename."""
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, array in tensors.items():
        if ".experts." in name and name.split(".experts.")[1][0].isdigit():
            before, after = name.split(".experts.")
            expert, part = after.split(".", 1)
            stacks.setdefault(f"{before}.experts.{part}", {})[int(expert)] = array
        else:
            out |= _changed(name, array, config)
    if config.model_type == "nemotron_h":  # the same
        stacks = {name.replace("backbone", "model").replace("mixer", "mlp"): by for name, by in stacks.items()}
    if config.model_type == "lfm2_moe":  # the package knows the converter's names of its experts only
        stacks = {name.removeprefix("model."): by for name, by in stacks.items()}
    return out | {name: np.stack([by[n] for n in range(len(by))]) for name, by in stacks.items()}


def _changed(name: str, array: np.ndarray, config: PretrainedConfig) -> dict[str, np.ndarray]:
    family = config.model_type
    if family in ("gemma4_text", "gemma4_unified_text"):
        return {_of_gemma4(name): array}
    if family == "falcon_h1":
        array = _multiplied(name, array, config)
    if family in ("gemma", "gemma3_text", "nemotron") and name.endswith("norm.weight"):
        return {name: array + 1}
    if family in _IN_PAIRS and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return {name: array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)}
    if family.startswith(("qwen3_next", "qwen3_5")):
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            return {name: array + 1}
        if "linear_attn" in name:
            return _of_delta_net(name, array, config)
        if name.endswith("experts.gate_up_proj"):
            halves = np.split(array, 2, axis=1)
            return {
                f"{name.replace('gate_up', part)}.weight": half
                for part, half in zip(("gate", "up"), halves, strict=True)
            }
        return {f"{name}.weight" if name.endswith("experts.down_proj") else name: array}
    if name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        return {name.replace("shared_mlp.output_linear", "mlp.down_proj"): array}
    if name.endswith("shared_mlp.input_linear.weight"):
        halves, block = np.split(array, 2), "mlp.shared_experts" if config.num_local_experts else "mlp"
        return {
            name.replace("shared_mlp.input_linear", f"{block}.{part}_proj"): half
            for part, half in zip(("gate", "up"), halves, strict=True)
        }
    if name.endswith("input_linear.weight"):
        halves = np.split(array, 2, axis=1)
        return {
            name.replace("input_linear", f"experts.{part}"): half
            for part, half in zip(("w1", "w3"), halves, strict=True)
        }
    if name.endswith(("query_key_value.weight", "query_key_value.bias")):
        by_head = array.reshape(config.num_attention_heads, 3, -1, *array.shape[1:])
        return {name: by_head.swapaxes(0, 1).reshape(array.shape)}
    if name.endswith("kv_b_proj.weight"):
        by_head = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = np.split(by_head, [config.qk_nope_head_dim], axis=1)
        return {name.replace("kv_b", "k_b"): keys.swapaxes(1, 2), name.replace("kv_b", "v_b"): values}
    if name.endswith(("e_score_correction_bias", "expert_bias")):
        return {f"{name.removesuffix('_bias')}.bias" if "correction" in name else f"{name}.bias": array.reshape(-1)}
    if family == "gpt2" and name.endswith(("attn.c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return {name: array.T}
    if name.endswith("sinks"):
        return {f"{name}.weight": array}
    if "experts.gate_up_proj" in name:
        turned = array if name.endswith("_bias") else array.swapaxes(1, 2)
        in_turns = (turned[:, ::2], turned[:, 1::2])
        halves = in_turns if family == "gpt_oss" else np.split(turned, 2, axis=1)
        return {_plain(name.replace("gate_up", part)): half for part, half in zip(("gate", "up"), halves, strict=True)}
    if name.endswith("experts.down_proj"):
        return {_plain(name): array.swapaxes(1, 2)}
    if name.endswith("experts.down_proj_bias"):
        return {_plain(name): array}
    if "conv" in name and array.ndim == 3:
        return {name: array[:, 0]}
    if name.endswith("A_log"):
        return {name: -np.exp(array[:, None] if family in _MAMBA2 else array)}
    if family in _MAMBA2 and name.endswith(".D"):
        return {name: array[:, None]}
    if family in _MAMBA2 and name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        groups = config.n_groups if family in ("mamba2", "nemotron_h") else config.mamba_n_groups
        return {name: array.reshape(groups, -1)}
    return {name.replace("dt_bias", "dt_proj.bias"): array}


def _multiplied(name: str, array: np.ndarray, config: PretrainedConfig) -> np.ndarray:
    """Return a matrix of Falcon-H1 times the config's multipliers of its inputs and outputs."""
    if name.endswith("in_proj.weight"):
        states = config.mamba_n_groups * config.mamba_d_state
        sizes = [config.mamba_d_ssm, config.mamba_d_ssm, states, states, config.mamba_n_heads]
        return array * (config.ssm_in_multiplier * np.repeat(np.float32(config.ssm_multipliers), sizes))[:, None]
    factors = {
        "down_proj.weight": config.mlp_multipliers[1],
        "gate_proj.weight": config.mlp_multipliers[0],
        "k_proj.weight": config.key_multiplier * config.attention_in_multiplier,
        "q_proj.weight": config.attention_in_multiplier,
        "v_proj.weight": config.attention_in_multiplier,
        "o_proj.weight": config.attention_out_multiplier,
        "out_proj.weight": config.ssm_out_multiplier,
        "lm_head.weight": config.lm_head_multiplier,
        "embed_tokens.weight": config.embedding_multiplier,
    }
    return array * np.float32(next((factor for end, factor in factors.items() if name.endswith(end)), 1.0))


def _of_delta_net(name: str, array: np.ndarray, config: PretrainedConfig) -> dict[str, np.ndarray]:
    """Qwen3-Next's fused projection becomes two; Qwen3.5's value heads are put in another order."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim, times = config.linear_key_head_dim, config.linear_value_head_dim, values // keys
    if name.endswith("in_proj_qkvz.weight"):
        ends = np.cumsum([key_dim, key_dim, times * value_dim])
        parts = np.split(array.reshape(keys, -1, array.shape[1]), ends, axis=1)
        q, k, v, z = (part.reshape(-1, array.shape[1]) for part in parts)
        return {name.replace("qkvz", "qkv"): np.concatenate([q, k, v]), name.replace("qkvz", "z"): z}
    if config.model_type != "qwen3_next":
        order = np.arange(values * value_dim).reshape(keys, times, value_dim).swapaxes(0, 1).reshape(-1)
        by_head = np.arange(values).reshape(keys, times).T.reshape(-1)
        if "in_proj_qkv" in name or "conv1d" in name:
            cut = 2 * keys * key_dim
            array = np.concatenate([array[:cut], array[cut:][order]])
        elif "in_proj_z" in name:
            array = array[order]
        elif "out_proj" in name:
            array = array[:, order]
        elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
            array = array[by_head]
    if name.endswith("A_log"):
        return {name: -np.exp(array)}
    return {name.replace("dt_bias", "dt_proj.bias"): array[:, 0] if "conv1d" in name else array}


def _of_gemma4(name: str) -> str:
    """The names of what has none of its own: an expert's scale and the router's are scales of matrices beside them."""
    name = name.replace("router.per_expert_scale", "experts.down_proj.scale")
    name = name.replace("router.scale", "router.proj.scale")
    return name if name.endswith((".weight", ".bias", ".scale")) else f"{name}.weight"


def _divisors(config: PretrainedConfig) -> np.ndarray:
    """Return what the frequencies of global layers are divided by: pairs that stand still by almost anything."""
    pairs = config.per_layer_config[config.num_hidden_layers - 1].head_dim // 2
    turning = int(pairs * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return np.array([1.0] * turning + [1e30] * (pairs - turning), np.float32)


def _llama3_divisors(config: PretrainedConfig) -> np.ndarray:
    """Return what Llama 3's scaling divides the frequencies by, as the converter writes them."""
    rope, head_dim = config.rope_parameters, config.hidden_size // config.num_attention_heads
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    longest = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    shortest = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    smooth = (rope["original_max_position_embeddings"] / wavelengths - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    divisors = np.where(wavelengths > longest, rope["factor"], np.where(wavelengths < shortest, 1.0, between))
    return divisors.astype(np.float32)


def _plain(name: str) -> str:
    return f"{name.removesuffix('_bias')}.bias" if name.endswith("_bias") else f"{name}.weight"


def _metadata(arch: str, config: PretrainedConfig) -> dict[str, Any]:
    """Return the keys that the converter writes."""
    family, layers = config.model_type, config.num_hidden_layers
    keys: dict[str, Any] = {
        "context_length": getattr(config, "max_position_embeddings", 1 << 20),
        "embedding_length": config.hidden_size,
        "block_count": layers,
    }
    if family == "mamba2":
        keys |= {
            "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
            "ssm.conv_kernel": config.conv_kernel,
            "ssm.inner_size": config.expand * config.hidden_size,
            "ssm.state_size": config.state_size,
            "ssm.time_step_rank": config.num_heads,
            "ssm.group_count": config.n_groups,
        }
        return _full(arch, keys, config)
    if family in ("gemma4_text", "gemma4_unified_text"):
        return _full(arch, keys | _gemma4_keys(config), config)
    if family == "gpt2":
        keys |= {"feed_forward_length": 4 * config.hidden_size, "attention.head_count": config.num_attention_heads}
        return _full(arch, keys | {"attention.layer_norm_epsilon": config.layer_norm_epsilon}, config)
    width = config.intermediate_size_mlp if family == "llama4_text" else getattr(config, "intermediate_size", None)
    layer_norm = {"starcoder2": "norm_epsilon", "nemotron": "norm_eps"} | dict.fromkeys(
        ("stablelm", "cohere", "cohere2", "gpt_neox", "phi"), "layer_norm_eps"
    )
    own = dict.fromkeys(("lfm2", "lfm2_moe"), "norm_eps") | {"nemotron_h": "layer_norm_epsilon"} | layer_norm
    eps = own.get(family, "rms_norm_eps")
    keys |= {
        "feed_forward_length": width,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", config.num_attention_heads),
        f"attention.layer_norm_{'' if family in layer_norm else 'rms_'}epsilon": getattr(config, eps),
    }
    if getattr(config, "head_dim", None):
        keys["attention.key_length"] = config.head_dim
    rope = getattr(config, "rope_parameters", None)
    if rope:
        rope = rope.get("full_attention", rope)
        keys["rope.freq_base"] = float(rope["rope_theta"])
        if rope["rope_type"] == "longrope":  # llama.cpp's converter does not name it
            keys["rope.scaling.original_context_length"] = config.original_max_position_embeddings
            scale = config.max_position_embeddings / config.original_max_position_embeddings
            attn_factor = (1 + np.log(scale) / np.log(config.original_max_position_embeddings)) ** 0.5
            keys["rope.scaling.attn_factor"] = float(attn_factor)
        elif rope["rope_type"] not in ("default", "llama3"):
            keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        if rope["rope_type"] == "yarn":
            keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts and arch != "nemotron_h":
        keys |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    keys |= _further_keys(config, experts)
    if family in ("gemma3_text", "gpt_oss", "phi3", "cohere2", "exaone4", "olmo3"):
        keys["attention.sliding_window"] = config.sliding_window
    if family in ("llama4_text", "gpt_oss"):
        keys["expert_feed_forward_length"] = config.intermediate_size
    if family == "qwen2_moe":
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if family in ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text"):
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    if family == "llama4_text":
        keys["interleave_moe_layer_step"] = config.interleave_moe_layer_step
    if family == "jamba":
        attends = [kind in ("attention", "full_attention") for kind in config.layers_block_type]
        keys |= {
            "attention.head_count_kv": [config.num_key_value_heads * attends[number] for number in range(layers)],
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.inner_size": config.mamba_expand * config.hidden_size,
            "ssm.state_size": config.mamba_d_state,
            "ssm.time_step_rank": config.mamba_dt_rank,
        }
    if family in ("lfm2", "lfm2_moe"):
        attends = [kind == "full_attention" for kind in config.layer_types]
        keys |= {
            "attention.head_count_kv": [config.num_key_value_heads * attends[number] for number in range(layers)],
            "shortconv.l_cache": config.conv_L_cache,
        }
    return _full(arch, keys, config)


def _further_keys(config: PretrainedConfig, experts: int | None) -> dict[str, Any]:
    """Return the keys of families like Llama that differ from it."""
    family, keys = config.model_type, {}
    rope = getattr(config, "rope_parameters", None) or {}
    if "partial_rotary_factor" in rope:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        keys["rope.dimension_count"] = int(head_dim * rope["partial_rotary_factor"])
    if family in ("granite", "granitemoe", "granitemoehybrid"):
        keys["attention.scale"] = config.attention_multiplier
        keys["embedding_scale"] = config.embedding_multiplier
        keys["residual_scale"] = config.residual_multiplier
        keys["logit_scale"] = config.logits_scaling
    if family in ("cohere", "cohere2"):
        keys |= {"logit_scale": config.logit_scale, "rope.scaling.type": "none"}
    if family in ("exaone4", "olmo3"):
        keys["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    if family == "ernie4_5_moe":
        keys |= {
            "expert_count": config.moe_num_experts,
            "expert_used_count": config.moe_k,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_count": config.moe_num_shared_experts,
            "interleave_moe_layer_step": config.moe_layer_interval,
            "leading_dense_block_count": config.moe_layer_start_index,
        }
    if family == "ministral3":
        keys["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        keys["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if family == "gpt_neox":
        keys["use_parallel_residual"] = config.use_parallel_residual
    if family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        keys |= {
            "attention.head_count_kv": 1,
            "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
            "attention.value_length": config.kv_lora_rank,
            "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "attention.value_length_mla": config.v_head_dim,
            "attention.kv_lora_rank": config.kv_lora_rank,
            "rope.dimension_count": config.qk_rope_head_dim,
        }
        if config.q_lora_rank:
            keys["attention.q_lora_rank"] = config.q_lora_rank
        if rope["rope_type"] == "yarn":
            keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if family == "nemotron_h":
        keys |= _nemotron_h_keys(config)
    if family in ("glm4_moe", "dots1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        dense = getattr(config, "mlp_layer_types", None)
        keys |= {
            "expert_count": config.n_routed_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_count": config.n_shared_experts,
            "leading_dense_block_count": dense.count("dense") if dense else config.first_k_dense_replace,
            "expert_gating_func": 1 if family == "deepseek_v2" else 2,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }
    if family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        keys |= {
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
            "full_attention_interval": 4,
        }
        if experts:
            keys["expert_feed_forward_length"] = config.moe_intermediate_size
            keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if family == "hunyuan_v1_moe":
        keys["expert_used_count"] = config.moe_topk
        keys |= dict.fromkeys(
            ("expert_feed_forward_length", "expert_shared_feed_forward_length"), config.intermediate_size
        )
        keys["expert_shared_count"] = 1
    if family == "falcon_h1":
        keys |= {
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.group_count": config.mamba_n_groups,
            "ssm.inner_size": config.mamba_d_ssm,
            "ssm.time_step_rank": config.mamba_n_heads,
        }
    if family == "granitemoehybrid":
        attends = [kind == "full_attention" for kind in config.layer_types]
        keys |= {
            "attention.head_count_kv": [config.num_key_value_heads * one for one in attends],
            "expert_shared_feed_forward_length": config.shared_intermediate_size,
            "rope.scaling.finetuned": False,
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.group_count": config.mamba_n_groups,
            "ssm.inner_size": config.mamba_expand * config.hidden_size,
            "ssm.time_step_rank": config.mamba_n_heads,
        }
    if family == "minimax_m2":
        keys["expert_feed_forward_length"] = config.intermediate_size
    if family == "lfm2_moe":
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
        keys["leading_dense_block_count"] = config.num_dense_layers
    return keys


def _nemotron_h_keys(config: PretrainedConfig) -> dict[str, Any]:
    kinds, has_experts = config.layers_block_type, "moe" in config.layers_block_type
    width, wide = (config.moe_intermediate_size, "moe") if has_experts else (config.intermediate_size, "mlp")
    keys = {
        "attention.head_count_kv": [config.num_key_value_heads * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [width * (kind == wide) for kind in kinds],
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.state_size": config.ssm_state_size,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.group_count": config.n_groups,
    }
    if has_experts:
        keys |= {
            "expert_count": config.n_routed_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_shared_count": config.n_shared_experts,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_group_count": config.n_group,
        }
        if config.moe_latent_size:
            keys["moe_latent_size"] = config.moe_latent_size
    return keys


def _gemma4_keys(config: PretrainedConfig) -> dict[str, Any]:
    layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
    by_layer = [config.per_layer_config[number] for number in range(layers)]
    whole, local = by_layer[-1], by_layer[0]
    keys = {
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": local.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": whole.head_dim,
        "attention.value_length": whole.head_dim,
        "attention.key_length_swa": local.head_dim,
        "attention.value_length_swa": local.head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": getattr(config, "hidden_size_per_layer_input", 0),
        "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "rope.dimension_count": whole.head_dim,
        "rope.dimension_count_swa": local.head_dim,
    }
    if config.use_double_wide_mlp:
        keys["feed_forward_length"] = [config.intermediate_size * (1 + (n >= layers - shared)) for n in range(layers)]
    if whole.num_key_value_heads != local.num_key_value_heads:
        keys["attention.head_count_kv"] = [own.num_key_value_heads for own in by_layer]
    if config.final_logit_softcapping:
        keys["final_logit_softcapping"] = config.final_logit_softcapping
    if getattr(config, "enable_moe_block", False):
        keys |= {"expert_count": config.num_experts, "expert_used_count": config.top_k_experts}
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    return keys


def _full(arch: str, keys: dict[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    ids = {
        "bos": getattr(config, "bos_token_id", None),
        "eos": config.eos_token_id,
        "padding": getattr(config, "pad_token_id", None),
    }
    tokens = {f"tokenizer.ggml.{role}_token_id": id for role, id in ids.items() if isinstance(id, int)}
    return {f"{arch}.{key}": value for key, value in keys.items()} | tokens
