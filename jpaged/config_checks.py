"""Checks that the engine's settings go together: each function raises a ValueError that names those that do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_LORAS, MAX_LORA_RANK = 1, 16
"""Values of the settings of these names by default."""


def check_together(settings: Mapping[str, Any]) -> None:
    """Check settings by the names of `jpaged.config.EngineConfig`, each of which has a value that is allowed alone.

    Raises:
        ValueError: two of them exclude each other.
    """
    _check_sizes(settings)
    _check_swapping(settings)
    _check_disk(settings)
    _check_replicas(settings)
    _check_lora(settings)
    if settings["background_compilation"] and settings["enforce_eager"]:
        raise ValueError("background_compilation=True does not go with enforce_eager=True, which compiles nothing")


def _check_sizes(settings: Mapping[str, Any]) -> None:
    """Check the sizes that are known; `SizedConfig` knows all."""
    size, interval = settings["block_size"], settings["state_checkpoint_interval"]
    if size is not None and size % 8:
        raise ValueError(f"block_size={size} is not a multiple of 8 (a sublane tile)")
    if size is not None and interval is not None and interval % size:
        raise ValueError(f"state_checkpoint_interval={interval} is not a multiple of block_size={size}")
    tokens, sequences = settings["max_num_batched_tokens"], settings["max_num_seqs"]
    if tokens is not None and sequences is not None and tokens < sequences:
        raise ValueError(
            f"max_num_batched_tokens={tokens} is below max_num_seqs={sequences}: a step could not give every "
            "running sequence one token"
        )


def _check_swapping(settings: Mapping[str, Any]) -> None:
    given, in_bytes = settings["swap_space"], settings["swap_space_bytes"]
    if given is not None and in_bytes is not None:
        raise ValueError(f"swap_space={given} and swap_space_bytes={in_bytes} are one setting: give one of them")
    for name in ("swap_space_bytes", "swap_space"):
        if settings["preemption_mode"] == "recompute" and settings[name] is not None:
            raise ValueError(f"{name}={settings[name]!r} needs preemption_mode='swap' or 'auto'")


def _check_disk(settings: Mapping[str, Any]) -> None:
    folder, replicas = settings["disk_folder"], settings["data_parallel_size"]
    if folder is None:
        for name in ("disk_space", "disk_break_even"):
            if settings[name] is not None:
                raise ValueError(f"{name}={settings[name]!r} needs disk_folder")
        return
    if not settings["enable_prefix_caching"]:
        raise ValueError(f"disk_folder={folder!r} needs enable_prefix_caching=True")
    if replicas > 1:
        raise ValueError(f"disk_folder={folder!r} needs data_parallel_size=1, not {replicas}")


def _check_replicas(settings: Mapping[str, Any]) -> None:
    replicas, mode = settings["data_parallel_size"], settings["preemption_mode"]
    if replicas == 1:
        return
    if mode != "recompute":
        raise ValueError(f"preemption_mode={mode!r} needs data_parallel_size=1, not {replicas}")
    if settings["deterministic"]:
        raise ValueError(f"deterministic=True needs data_parallel_size=1, not {replicas}")


def _check_lora(settings: Mapping[str, Any]) -> None:
    if settings["lora_modules"] and not settings["enable_lora"]:
        raise ValueError(f"lora_modules={settings['lora_modules']!r} need enable_lora=True")
    if not settings["enable_lora"]:
        for name, default in (("max_loras", MAX_LORAS), ("max_lora_rank", MAX_LORA_RANK)):
            if settings[name] != default:
                raise ValueError(f"{name}={settings[name]} needs enable_lora=True")
        return
    if settings["data_parallel_size"] > 1:
        raise ValueError(f"enable_lora=True needs data_parallel_size=1, not {settings['data_parallel_size']}")
    if settings["kv_budget"] is not None:
        raise ValueError(f"enable_lora=True does not go with kv_budget={settings['kv_budget']}")
