"""Interfaces of the adapters that requests name, and the one of an engine without adapters."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from jpaged.lora_request import LoRARequest
from jpaged.scheduling.inputs import Adapter

LoRA: TypeAlias = LoRARequest | str
"""An adapter, or the name of one that the engine knows."""


class AdapterSource(Protocol):
    """Finds adapters; see `jpaged.loading.lora.AdapterRegistry`."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def find(self, asked: LoRA) -> Adapter: ...

    def restored(self, name: str, digest: str) -> Adapter: ...


class NoAdapters:
    """The adapters of an engine that has none: every request for one is refused."""

    names: tuple[str, ...] = ()

    def find(self, asked: LoRA) -> Adapter:
        """Refuse any.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"lora_request={asked!r} needs an engine with enable_lora=True")

    def restored(self, name: str, digest: str) -> Adapter:
        """Refuse the adapter of a saved request.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"a restored request runs with the adapter {name!r}, which needs enable_lora=True")
