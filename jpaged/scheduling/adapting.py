"""Holds the adapters of running requests in the pool, and says when the device is told to load one."""

from __future__ import annotations

from collections.abc import Iterable

from jpaged.memory import HeldAdapter, MemoryManager, StoredAdapter
from jpaged.scheduling.adapter import Adapter
from jpaged.scheduling.request import Request
from jpaged.scheduling.step import AdapterLoad


class Adapting:
    """Holds the adapters of running requests in the pool.

    Args:
        memory: has the blocks.
        most: different adapters that a step can have.
    """

    def __init__(self, memory: MemoryManager, most: int) -> None:
        self._memory = memory
        self._most = most
        self._loading: dict[bytes, Adapter] = {}

    def clear(self) -> None:
        """Forget what was to be loaded: the memory was cleared."""
        self._loading.clear()

    def outstanding(self, request: Request) -> int:
        """Return how many blocks the request's adapter has yet to take: none where somebody holds it."""
        adapter = request.adapter
        if adapter is None or self._memory.adapters.in_use(adapter.digest):
            return 0
        return adapter.num_blocks

    def has_place(self, request: Request, others: Iterable[Request]) -> bool:
        """Tell whether a step of `others` has a place for the request's adapter."""
        if request.adapter is None:
            return True
        different = {other.adapter.digest for other in others if other.adapter is not None}
        return len(different | {request.adapter.digest}) <= self._most

    def hold(self, request: Request) -> bool:
        """Hold the request's adapter, which is loaded before the next step if it is not there; return False, with
        nothing changed, when memory is short."""
        adapter = request.adapter
        if adapter is None or request.held_adapter is not None:
            return True
        missing = not self._memory.adapters.holds_content(adapter.digest)
        held = self._memory.adapters.hold(adapter.digest, adapter.num_blocks)
        if held is None:
            return False
        if missing:
            self._loading[adapter.digest] = adapter
        request.held_adapter = held
        return True

    def forget(self, request: Request) -> None:
        """Forget the request's adapter where nobody holds it: the next hold finds it blocks that lie together."""
        if request.adapter is not None:
            self._memory.adapters.forget(request.adapter.digest)

    def let_go(self, request: Request) -> None:
        """Give up the request's hold on its adapter, which stays in the pool while there is room.

        One whose request could not go on alone is forgotten: its blocks lie where they leave others no large page.
        """
        held: HeldAdapter | None = request.held_adapter
        request.held_adapter = None
        if held is None:
            return
        self._memory.adapters.release(held)
        if request.alone:
            self.forget(request)

    def take_loads(self) -> list[AdapterLoad]:
        """Return what is to be loaded before the step's chunks."""
        if not self._loading:
            return []
        pending: list[StoredAdapter] = self._memory.adapters.take_pending()
        loads = [AdapterLoad(self._loading[stored.digest], stored) for stored in pending]
        self._loading.clear()
        return loads

    def dispatched(self, loads: Iterable[AdapterLoad]) -> None:
        """Note that the device was told to load these."""
        for load in loads:
            self._memory.adapters.encoded(load.stored)
