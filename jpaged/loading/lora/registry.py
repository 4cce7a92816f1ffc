"""Holds the adapters of an engine in host memory, within a bound, and reads them when requests name them."""

from __future__ import annotations

import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jpaged.execution.caches.adapters import AdapterCache
from jpaged.loading.loaded_model import LoadedModel
from jpaged.loading.lora.packing import packed
from jpaged.loading.lora.peft import read_peft_folder
from jpaged.loading.lora.sites import find_sites
from jpaged.lora_request import LoRARequest
from jpaged.memory.tiers import HostMemory
from jpaged.scheduling.inputs import Adapter


class _Named(NamedTuple):
    """Says what a name stands for as long as the engine lives.

    Attributes:
        folder: its absolute path.
        digest: see `Adapter`.
    """

    folder: str
    digest: bytes


@dataclass(eq=False)
class _Content:
    """An adapter in host memory.

    Attributes:
        adapter: its matrices, under the name by which it was read.
        users: the values that requests have; empty where no request uses the adapter.
    """

    adapter: Adapter
    users: set[weakref.ref[Adapter]] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        return self.adapter.blocks.nbytes


class AdapterRegistry:
    """Finds the adapters that requests name. Any thread may call it.

    Adapters lie in host memory in the layout of the pool's blocks, under their digests: two names of one content share
    it. Those that no request uses are dropped, least recently asked for first, while there are more than `most` or they
    take more bytes than `host` leaves them. A request that names a dropped one reads it again. Adapters that unfinished
    requests use stay, whatever the bounds, as the pool may have to load them again.

    A name keeps its content: dropping an adapter changes no token, so a folder that changed in the meantime is refused.

    Args:
        modules: folders of adapters to read now, by name.
        host: the bound on host memory, which counts the adapters' bytes and has unused ones dropped for swapped
            blocks.
        most: most adapters; None = only `host` bounds them.

    Raises:
        ValueError: one of them cannot be used, see `find`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: AdapterCache,
        modules: Mapping[str, str | Path],
        host: HostMemory,
        most: int | None = None,
    ) -> None:
        self._cache = cache
        self._host = host
        self._most = most
        _, self._places = find_sites(loaded)
        self._reading = threading.Lock()  # one thread reads at a time, and others find what is there
        self._lock = threading.Lock()  # of all that follows, see `_locked`; nothing is read while it is held
        self._known: dict[str, _Named] = {}  # changed while `_reading` is held too
        self._contents: OrderedDict[bytes, _Content] = OrderedDict()  # the one asked for last is last
        self._has_changed = False  # contents or their users, since they were last counted
        host.drop_unused = self._changed
        for name, path in modules.items():
            self.find(LoRARequest(name, 1, str(path)))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all adapters that were ever read."""
        with self._locked():
            return tuple(self._known)

    def find(self, asked: LoRARequest | str) -> Adapter:
        """Return an adapter; one that is not in host memory is read from its folder first.

        Raises:
            ValueError: the name is unknown and there is no folder, or another folder has that name already, or the
                adapter cannot be used with this model, or it was dropped and its folder is gone or has other content.
        """
        name, path = (asked, None) if isinstance(asked, str) else (asked.lora_name, asked.lora_path or None)
        folder, adapter = self._take(name, path)
        if adapter is None:
            with self._reading:
                folder, adapter = self._take(name, path)  # another thread may have given it a folder meanwhile
                if adapter is None:
                    adapter = self._keep(self._read(name, folder), folder)
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

    def _take(self, name: str, path: str | None) -> tuple[str, Adapter | None]:
        """Return the folder of a name, and its adapter for a request; None where that is not in host memory."""
        with self._locked():
            known = self._known.get(name)
            folder = self._folder(name, path)
            content = None if known is None else self._contents.get(known.digest)
            return folder, None if content is None else self._lend(name, content)

    def _folder(self, name: str, path: str | None) -> str:
        """Return the folder of a name, which may be asked for with a path."""
        known = self._known.get(name)
        if known is None and path is None:
            names = ", ".join(map(repr, self._known)) or "none"
            raise ValueError(f"lora_request={name!r} is no known adapter (known: {names}) and has no folder")
        folder = known.folder if known is not None else str(path)
        if known is not None and path is not None and Path(path).absolute() != Path(folder):
            raise ValueError(f"lora_path={path!r}: the adapter {name!r} was read from {folder}; choose another name")
        return folder

    def _read(self, name: str, folder: str) -> Adapter:
        """Read an adapter, for the first time or again."""
        known = self._known.get(name)
        dropped = f"the adapter {name!r} was dropped from host memory (max_cpu_loras, kv_offloading_size)"
        try:
            adapter = packed(name, read_peft_folder(folder), self._places, self._cache)
        except (ValueError, OSError) as error:
            if known is None:
                raise
            raise ValueError(f"{dropped} and cannot be read again: {error}") from error
        if known is not None and adapter.digest != known.digest:
            raise ValueError(
                f"{dropped}, and {folder} has another content now than when it was first read: choose another name"
            )
        return adapter

    def _keep(self, adapter: Adapter, folder: str) -> Adapter:
        """Keep an adapter that was read, and return it for a request."""
        with self._locked():
            self._known.setdefault(adapter.name, _Named(str(Path(folder).absolute()), adapter.digest))
            return self._lend(adapter.name, self._contents.setdefault(adapter.digest, _Content(adapter)))

    def _lend(self, name: str, content: _Content) -> Adapter:
        """Make a value for a request, as long as which lives the content stays."""
        whole = content.adapter

        def let_go(user: weakref.ref[Adapter]) -> None:
            content.users.discard(user)
            self._changed()

        adapter = Adapter(name, whole.digest, whole.blocks, whole.site_blocks)
        content.users.add(weakref.ref(adapter, let_go))
        self._contents.move_to_end(whole.digest)
        self._has_changed = True
        return adapter

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock; then count what changed, also what others, who never wait for the lock, have changed."""
        try:
            with self._lock:
                yield
        finally:
            self._settle()

    def _changed(self) -> None:
        """Count contents and users again, and drop what is too much: now, or when the lock is let go."""
        self._has_changed = True
        self._settle()

    def _settle(self) -> None:
        # Any thread may be here, even one that holds the lock, in which Python collects garbage: never wait for it.
        while self._has_changed and self._lock.acquire(blocking=False):
            try:
                self._has_changed = False
                self._drop_unused()
            finally:
                self._lock.release()

    def _drop_unused(self) -> None:
        """Drop contents that no request uses, least recently asked for first, while there are too many."""
        self._count()
        for digest, content in list(self._contents.items()):
            if self._host.adapters <= self._host.for_adapters and len(self._contents) <= (self._most or math.inf):
                break
            if not content.users:
                del self._contents[digest]
                self._count()

    def _count(self) -> None:
        contents = list(self._contents.values())
        self._host.adapters = sum(content.num_bytes for content in contents)
        self._host.used_adapters = sum(content.num_bytes for content in contents if content.users)
