"""From the settings of low-rank adapters to what keeps and finds them."""

from __future__ import annotations

from jpaged.config import EngineConfig
from jpaged.execution import PoolSpec
from jpaged.execution.caches.adapters import AdapterCache
from jpaged.loading import LoadedModel
from jpaged.loading.lora import Adaptable, AdapterRegistry, adapter_group
from jpaged.model_api import AdapterGroup, CrossAttentionGroup, TakesImages


def adapters_of(config: EngineConfig, loaded: Adaptable, several_processes: bool) -> AdapterGroup | None:
    """Return the layer group that keeps adapters; None where there are none.

    Raises:
        ValueError: adapters do not go with the model, or with the way it is run.
    """
    if not config.enable_lora:
        return None
    if several_processes:
        raise ValueError("enable_lora=True needs one process, not several hosts")
    if isinstance(loaded.model, TakesImages) and isinstance(loaded.model.image_group, CrossAttentionGroup):
        raise ValueError(
            f"enable_lora=True, but {config.model} attends to images, whose K and V are made without adapters; "
            "language_model_only=True leaves images out"
        )
    return adapter_group(loaded, rank=config.max_lora_rank, adapters=config.max_loras, in_turn=config.deterministic)


def adapter_registry(config: EngineConfig, loaded: LoadedModel, spec: PoolSpec) -> AdapterRegistry | None:
    """Return what finds adapters, those of lora_modules read; None where there are none.

    Raises:
        ValueError: one of them cannot be used.
    """
    found = [cache for cache in spec.caches if isinstance(cache, AdapterCache)]
    return AdapterRegistry(loaded, found[0], config.lora_modules) if found else None
