"""Holds the adapters of an engine by name; each is read once, at the start or at its first use."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from jpaged.execution.caches.adapters import AdapterCache
from jpaged.loading.loaded_model import LoadedModel
from jpaged.loading.lora.packing import packed
from jpaged.loading.lora.peft import read_peft_folder
from jpaged.loading.lora.sites import find_sites
from jpaged.lora_request import LoRARequest
from jpaged.scheduling.inputs import Adapter


class AdapterRegistry:
    """Finds the adapters that requests name. Any thread may call it.

    All adapters that were read stay in host memory, in the layout of the pool's blocks.

    Args:
        modules: folders of adapters to read now, by name.

    Raises:
        ValueError: one of them cannot be used, see `find`.
    """

    def __init__(self, loaded: LoadedModel, cache: AdapterCache, modules: Mapping[str, str | Path]) -> None:
        self._cache = cache
        _, self._places = find_sites(loaded)
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, Adapter]] = {}
        for name, path in modules.items():
            self.find(LoRARequest(name, 1, str(path)))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all adapters that were read."""
        return tuple(self._known)

    def find(self, asked: LoRARequest | str) -> Adapter:
        """Return an adapter; an unknown one is read from its folder first.

        Raises:
            ValueError: the name is unknown and there is no folder, or another folder has that name already, or the
                adapter cannot be used with this model.
        """
        name, path = (asked, None) if isinstance(asked, str) else (asked.lora_name, asked.lora_path or None)
        with self._lock:
            known = self._known.get(name)
            if known is not None:
                folder, adapter = known
                if path is not None and Path(path).absolute() != Path(folder):
                    raise ValueError(
                        f"lora_path={path!r}: the adapter {name!r} was read from {folder}; choose another name"
                    )
                return adapter
            if path is None:
                names = ", ".join(map(repr, self._known)) or "none"
                raise ValueError(f"lora_request={name!r} is no known adapter (known: {names}) and has no folder")
            adapter = packed(name, read_peft_folder(path), self._places, self._cache)
            self._known[name] = str(Path(path).absolute()), adapter
            return adapter

    def restored(self, name: str, digest: str) -> Adapter:
        """Return the adapter of a saved request.

        Raises:
            ValueError: no adapter has this name, or its content differs.
        """
        adapter = self.find(name)
        if adapter.digest.hex() != digest:
            raise ValueError(f"the adapter {name!r} has another content than when the state was saved")
        return adapter
