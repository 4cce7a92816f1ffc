"""Writes low-rank adapters to the pool, and gives steps their matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import ClassVar

import numpy as np
from jaxtyping import UInt8

from jpaged.execution.batch import StepBatch
from jpaged.execution.caches.base import Pool
from jpaged.execution.programs import Compile
from jpaged.execution.transfer.adapter_matrices import AdapterMatrices
from jpaged.execution.work.base import PoolWork, WorkContext
from jpaged.scheduling.step import AdapterLoad
from jpaged.scheduling.work import LOADS


class Loads(PoolWork):
    """Writes the host's copies of adapters, one of each replica a call.

    Attributes:
        matrices: what steps read of adapters.
    """

    kind: ClassVar[str] = LOADS
    needed: ClassVar[bool] = True

    def __init__(self, context: WorkContext) -> None:
        self._spec = context.spec
        self._mover = context.mover
        self._adapts = context.settings.adapters
        self.matrices = AdapterMatrices(context.spec, context.mesh, *context.on_compile, store=context.store)

    def calls(
        self, each: Sequence[Sequence[AdapterLoad]]
    ) -> Iterator[tuple[list[Sequence[int]], list[UInt8[np.ndarray, "shards blocks bytes"]]]]:
        group = self._mover.adapters
        assert group is not None, "an engine without adapters was given one"
        size = self._spec.layout.groups[group].block_bytes
        nothing = np.zeros((self._spec.shards, 0, size), np.uint8)
        for loads in zip_longest(*each):
            contents = [nothing if load is None else load.adapter.blocks for load in loads]
            padded = [np.pad(held, ((0, 0), (0, 0), (0, size - held.shape[2]))) for held in contents]
            yield [[] if load is None else load.stored.blocks for load in loads], padded

    def run(
        self, pool: Pool, each: Sequence[Sequence[int]], contents: Sequence[UInt8[np.ndarray, "shards blocks bytes"]]
    ) -> Pool:
        """Write adapters to blocks of each replica."""
        group = self._mover.adapters
        assert group is not None, "an engine without adapters was asked to write one"
        size, *_ = self._mover.sizes[group]
        self.matrices.written(each)
        for start in range(0, max(map(len, each)), size):
            part = [rows[:, start : start + size] for rows in contents]
            pool = self._mover.write(pool, group, [blocks[start : start + size] for blocks in each], part, size)
        return pool

    def shapes(self) -> Iterator[tuple[str, Callable[[], Compile]]]:
        if self._adapts:
            group = self._mover.adapters
            assert group is not None, "an engine with adapters has blocks for them"
            yield "adapter load", partial(self._mover.prepare_scatter, group, self._mover.sizes[group][0])
            yield from self.matrices.shapes()

    def given(self, pool: Pool, batch: StepBatch) -> StepBatch:
        return self.matrices.given(pool, batch)

    def release(self) -> None:
        self.matrices.release()

    def close(self) -> None:
        self.matrices.close()
