"""Lists the keys of PEFT's adapter_config.json: those that are read, have required values, or matter in training
only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

READ = frozenset(
    {
        "r",
        "lora_alpha",
        "use_rslora",
        "target_modules",
        "exclude_modules",
        "rank_pattern",
        "alpha_pattern",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
    }
)
"""Keys whose values `PeftConfig` reads."""

ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "megatron_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
"""Keys with their supported values; a missing key counts as the first value. MonteCLoRA and VeLoRA change training
only, but their layers have further tensors besides the two matrices."""

HARMLESS: Mapping[str, str] = {
    "auto_mapping": "names the base model's class",
    "base_model_name_or_path": "names the base model",
    "corda_config": "says how CorDA began; init_lora_weights tells whether it did",
    "ensure_weight_tying": "ties adapters of embeddings to those of the head, whose tensors are refused",
    "eva_config": "says how EVA began, which leaves the model's weights as they are",
    "inference_mode": "says whether the matrices are frozen",
    "lora_dropout": "is left out at inference",
    "lora_ga_config": "says how LoRA-GA began; init_lora_weights tells whether it did",
    "loftq_config": "says how LoftQ began; init_lora_weights tells whether it did",
    "megatron_core": "names the module of Megatron that megatron_config is for",
    "peft_version": "names PEFT's version",
    "qalora_group_size": "is read by PEFT with use_qalora only",
    "revision": "names the base model's revision",
    "runtime_config": "says how PEFT runs; PEFT does not read it from a file either",
    "task_type": "names the class that PEFT wraps the model in",
}
"""Keys that cannot change a forward pass at inference, each with its meaning."""

BOOLEANS = (
    "use_rslora",
    "use_dora",
    "use_qalora",
    "fan_in_fan_out",
    "lora_bias",
    "inference_mode",
    "ensure_weight_tying",
)
"""Keys whose values are true or false; null means false."""

_BEGINS = ("gaussian", "orthogonal", "eva", "mica")
"""Values of ``init_lora_weights``, besides true and false, with which PEFT does not change the model's weights."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of ``init_lora_weights`` with which PEFT subtracts the adapter's initial product from the model's
weights."""


def check_keys(file: Path, data: Mapping[str, Any]) -> None:
    """Check that a file has supported settings only.

    Raises:
        ValueError: an unknown key has a value other than null, false or an empty one, or a known key has an unsupported
            value. Names the file, the key and the value.
    """
    for key in BOOLEANS:
        if not isinstance(data.get(key), bool | None):
            raise ValueError(f"{file}: {key}={data[key]!r} must be true or false")
    for key, supported in ONLY.items():
        value = data.get(key, supported[0])
        if value not in supported and not (value is None and key in BOOLEANS):
            raise ValueError(f"{file}: {key}={value!r} is not supported; supported is {supported[0]!r}")
    for key in sorted(data.keys() - READ - ONLY.keys() - HARMLESS.keys()):
        if data[key]:
            raise ValueError(f"{file}: {key}={data[key]!r} is not known, and may change what the adapter computes")
    _check_beginning(file, data.get("init_lora_weights"))


def _check_beginning(file: Path, began: Any) -> None:
    if isinstance(began, bool | None) or (isinstance(began, str) and began.lower() in _BEGINS):
        return
    if isinstance(began, str) and began.lower().startswith(_CHANGES_BASE):
        raise ValueError(
            f"{file}: init_lora_weights={began!r} is not supported, as it changes the model's weights: save the "
            "adapter by PEFT's `path_initial_model_for_weight_conversion`, which makes a plain one of it"
        )
    raise ValueError(
        f"{file}: init_lora_weights={began!r} is not known, and may change the model's weights; known are true, false, "
        f"{', '.join(map(repr, _BEGINS))}"
    )
