"""Low-rank adapters: a request holds the one that it runs with, as a whole."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq
from typing import Any, ClassVar, NamedTuple

from jpaged.memory import Adapters, HeldAdapter, MemoryManager, StoredAdapter
from jpaged.scheduling.held.base import Arrays, HeldWhole, SavedArrays, StepLimits
from jpaged.scheduling.inputs import Adapter, SavedAdapter
from jpaged.scheduling.request import Request
from jpaged.scheduling.step import AdapterLoad, Chunk
from jpaged.scheduling.work import LOADS


class AdapterUse(NamedTuple):
    """A sequence of the step that runs with an adapter, which lies in the blocks of `held`."""

    seq_id: int
    adapter: Adapter
    held: HeldAdapter


class AdapterHolds(HeldWhole):
    """Holds the adapters of running requests; the device loads them."""

    kind: ClassVar[str] = Adapters.kind
    saved_name: ClassVar[str] = "adapter"
    work: ClassVar[str] = LOADS

    def __init__(self, memory: MemoryManager, limits: StepLimits) -> None:
        super().__init__(memory, limits)
        policy = self.blocks.policy
        assert isinstance(policy, Adapters)
        self._places = policy.places

    def has_place(self, request: Request, others: Iterable[Request]) -> bool:
        asking = (request, *(other for other in others if self.kind in other.asks))
        return len({other.asks[self.kind].digest for other in asking}) <= self._places

    def features(self, content: Adapter) -> int:
        return content.num_blocks

    def made(self, content: Adapter, stored: StoredAdapter) -> AdapterLoad:
        return AdapterLoad(content, stored)

    def rows(self, request: Request, chunks: Seq[Chunk]) -> Iterable[AdapterUse]:
        adapter, held = request.asks[self.kind], request.held[self.kind]
        return (AdapterUse(chunk.seq.seq_id, adapter, held) for chunk in chunks)

    def salt(self, request: Request) -> tuple[Hashable, ...]:
        adapter: Adapter = request.asks[self.kind]
        return adapter.salt

    @classmethod
    def data(cls, request: Request, arrays: SavedArrays) -> list[str] | None:
        return list(request.asks[cls.kind].salt) if cls.kind in request.asks else None

    @classmethod
    def load(cls, data: Any, arrays: Seq[Arrays]) -> SavedAdapter | None:
        """Return the names of an adapter, which the engine exchanges for the adapter."""
        return None if data is None else SavedAdapter(*data)
