"""Tiny random models and adapters that PEFT makes, and what PEFT on torch generates with them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedModel

_SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**_SIZES),
    "gemma3": Gemma3TextConfig(
        **{**_SIZES, "tie_word_embeddings": True, "num_hidden_layers": 4},
        head_dim=16,
        sliding_window=16,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "small": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    "all": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "rank_pattern": {"down_proj": 3, r"layers\.1\.self_attn\.q_proj": 6},
        "alpha_pattern": {"up_proj": 2},
    },
    "some": {
        "r": 5,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": ["o_proj", "down_proj", "gate_proj"],
        "layers_to_transform": [0, 2],
    },
}
"""Adapters that differ in rank, factor, modules and layers; no rank is above 6."""


def save_model(name: str, folder: Path) -> str:
    """Write a random model of a family into a new folder below; return its path."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    model.save_pretrained(folder / name)
    return str(folder / name)


def save_adapter(model: str, folder: Path, name: str, **settings: Any) -> str:
    """Write a random adapter of a model, by default one of `ADAPTERS`; return its folder."""
    config = LoraConfig(task_type="CAUSAL_LM", **(settings or ADAPTERS[name]))
    return save_random_adapter(AutoModelForCausalLM.from_pretrained(model), config, folder / name)


def save_random_adapter(model: PreTrainedModel, config: LoraConfig, folder: Path) -> str:
    """Write an adapter of a model, random by its folder's name; return the folder. The model is changed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, config)
    randoms = torch.Generator().manual_seed(sum(map(ord, folder.name)))
    for path, parameter in adapted.named_parameters():
        if "lora_" in path:
            parameter.data = 0.25 * torch.randn(parameter.shape, generator=randoms)
    adapted.save_pretrained(folder)
    return str(folder)


def torch_model(model: str, adapter: str | None) -> PreTrainedModel:
    """Return the model on torch, with PEFT's products beside its own."""
    plain = AutoModelForCausalLM.from_pretrained(model, experts_implementation="eager").eval()
    return plain if adapter is None else PeftModel.from_pretrained(plain, adapter).eval().base_model.model


def save_all(family: str, folder: Path, names: Sequence[str] = tuple(ADAPTERS)) -> tuple[str, dict[str, str]]:
    """Write a model and adapters; return its folder and theirs by name."""
    model = save_model(family, folder)
    return model, {name: save_adapter(model, folder, name) for name in names}
