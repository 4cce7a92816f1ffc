"""Low-rank adapters: a request holds the one that it runs with, as a whole."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq
from typing import Any, ClassVar, NamedTuple

from jpaged.memory import Adapters, HeldAdapter, MemoryManager
from jpaged.scheduling.held.base import Arrays, Held, SavedArrays, StepLimits
from jpaged.scheduling.inputs import Adapter, SavedAdapter
from jpaged.scheduling.request import Request
from jpaged.scheduling.step import AdapterLoad, Chunk, ScheduledStep, StepPlan
from jpaged.scheduling.work import LOADS


class AdapterUse(NamedTuple):
    """A sequence of the step that runs with an adapter, which lies in the blocks of `held`."""

    seq_id: int
    adapter: Adapter
    held: HeldAdapter


class AdapterHolds(Held):
    """Holds the adapters of running requests, and plans when the device loads them."""

    kind: ClassVar[str] = Adapters.kind
    saved_name: ClassVar[str] = "adapter"

    def __init__(self, memory: MemoryManager, limits: StepLimits) -> None:
        super().__init__(memory, limits)
        policy = self.blocks.policy
        assert isinstance(policy, Adapters)
        self._places = policy.places
        self._loading: dict[bytes, Adapter] = {}

    def has_place(self, request: Request, others: Iterable[Request]) -> bool:
        different = {other.asks[self.kind].digest for other in others if self.kind in other.asks}
        return len(different | {_adapter(request).digest}) <= self._places

    def lifetime(self, request: Request) -> int:
        return _adapter(request).num_blocks

    def outstanding(self, request: Request) -> int:
        adapter = _adapter(request)
        return 0 if self.blocks.in_use(adapter.digest) else adapter.num_blocks

    def reclaimed(self, victim: Request, request: Request) -> Iterable[int]:
        held, mine = victim.held.get(self.kind), request.asks.get(self.kind)
        is_shared = mine is not None and mine.digest == _adapter(victim).digest
        return () if held is None or is_shared else held.blocks

    def hold(self, request: Request) -> bool:
        if self.kind in request.held:
            return True
        adapter = _adapter(request)
        missing = not self.blocks.holds_content(adapter.digest)
        held = self.blocks.hold(adapter.digest, adapter.num_blocks)
        if held is None:
            return False
        if missing:
            self._loading[adapter.digest] = adapter
        request.held[self.kind] = held
        return True

    def release(self, request: Request) -> None:
        held = request.held.pop(self.kind, None)
        if held is None:
            return
        self.blocks.release(held)
        if request.runs_exclusively:
            self.forget(request)  # its blocks lie where they left the request no large page

    def forget(self, request: Request) -> None:
        self.blocks.forget(_adapter(request).digest)

    def clear(self) -> None:
        self._loading.clear()

    def rows(self, request: Request, chunks: Seq[Chunk]) -> Iterable[AdapterUse]:
        adapter, held = _adapter(request), request.held[self.kind]
        return (AdapterUse(chunk.seq.seq_id, adapter, held) for chunk in chunks)

    def take(self, plan: StepPlan) -> None:
        if self._loading:
            pending = self.blocks.take_pending()
            plan.add_work(LOADS, (AdapterLoad(self._loading[stored.digest], stored) for stored in pending))
            self._loading.clear()

    def dispatched(self, step: ScheduledStep) -> None:
        for load in step.work_of(LOADS):
            self.blocks.encoded(load.stored)

    def salt(self, request: Request) -> tuple[Hashable, ...]:
        return _adapter(request).salt

    @classmethod
    def data(cls, request: Request, arrays: SavedArrays) -> list[str] | None:
        return list(request.asks[cls.kind].salt) if cls.kind in request.asks else None

    @classmethod
    def load(cls, data: Any, arrays: Seq[Arrays]) -> SavedAdapter | None:
        """Return the names of an adapter, which the engine exchanges for the adapter."""
        return None if data is None else SavedAdapter(*data)


def _adapter(request: Request) -> Adapter:
    found: Adapter = request.asks[Adapters.kind]
    return found
