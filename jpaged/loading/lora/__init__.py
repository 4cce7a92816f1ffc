"""Reads low-rank adapters from PEFT folders, and lays them out as the pool keeps them.

`peft` reads a folder; `sites` finds the model's parameter that each module is part of; `packing` makes the blocks;
`registry` holds the adapters of an engine.
"""

from jpaged.loading.lora.registry import AdapterRegistry
from jpaged.loading.lora.sites import Adaptable, adapter_group

__all__ = ["Adaptable", "AdapterRegistry", "adapter_group"]
