"""The device's half of the work: writes vectors to the pool before the tokens that get them are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
from held_kind.holds import Steering, SteeringHolds, Write
from jaxtyping import UInt8

from jpaged.execution.caches.base import Pool
from jpaged.execution.programs import Compile
from jpaged.execution.work.base import PoolWork, WorkContext

Bytes = UInt8[np.ndarray, "shards blocks bytes"]


class Writes(PoolWork):
    """Writes vectors to their blocks, each as the bytes of a block."""

    kind: ClassVar[str] = SteeringHolds.work
    needed: ClassVar[bool] = True

    def __init__(self, context: WorkContext) -> None:
        groups = context.spec.layout.groups
        (self._group,) = (g for g, plan in enumerate(groups) if isinstance(plan.spec.policy, Steering))
        self._shards, self._block_bytes = context.spec.shards, groups[self._group].block_bytes
        self._mover = context.mover
        self._most = self._mover.sizes[self._group][0]

    def calls(self, each: Sequence[Sequence[Write]]) -> Iterator[tuple[list[list[int]], list[Bytes]]]:
        blocks = [self._blocks(writes) for writes in each]
        for start in range(0, max(len(ids) for ids, _ in blocks), self._most):
            part = slice(start, start + self._most)
            yield [ids[part] for ids, _ in blocks], [contents[:, part] for _, contents in blocks]

    def _blocks(self, writes: Sequence[Write]) -> tuple[list[int], Bytes]:
        """Return the blocks that a replica fills, and what with."""
        ids = [block for write in writes for block in write.stored.blocks]
        vectors = [vector for write in writes for vector in write.vectors.numbers]
        contents = np.zeros((self._shards, len(ids), self._block_bytes), np.uint8)
        for i, vector in enumerate(vectors):
            contents[:, i, : 4 * vector.size] = np.ascontiguousarray(vector, np.float32).view(np.uint8)
        return ids, contents

    def run(self, pool: Pool, ids: Sequence[Sequence[int]], contents: Sequence[Bytes]) -> Pool:
        return self._mover.write(pool, self._group, ids, contents, self._most)

    def shapes(self) -> Iterator[tuple[str, Callable[[], Compile]]]:
        yield self.kind, partial(self._mover.prepare_scatter, self._group, self._most)
