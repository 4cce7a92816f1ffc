"""Interfaces of the adapters that requests name, and the one of an engine without adapters."""

from __future__ import annotations

from collections.abc import Sequence
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


def one_lora_each(lora_request: LoRA | Sequence[LoRA | None] | None, count: int) -> Sequence[LoRA | None]:
    """Return an adapter, or None, for every prompt.

    Raises:
        ValueError: there are not as many as prompts.
        TypeError: one is no LoRARequest and no name.
    """
    several = isinstance(lora_request, Sequence) and not isinstance(lora_request, str)
    each = lora_request if isinstance(lora_request, Sequence) and several else [lora_request] * count
    if len(each) != count:
        raise ValueError(f"{len(each)} lora_requests for {count} prompts")
    for one in each:
        if one is not None and not isinstance(one, LoRARequest | str):
            raise TypeError(f"lora_request={one!r} must be a LoRARequest, an adapter's name or None")
    return each  # type: ignore[return-value]
