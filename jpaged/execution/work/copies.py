"""Copies blocks within the pool: copy-on-write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import ClassVar, TypeAlias

import numpy as np
from jaxtyping import Int

from jpaged.execution.caches.base import Pool
from jpaged.execution.caches.pool import PoolSpec, abstract_pool
from jpaged.execution.compile.program import Program
from jpaged.execution.mesh import num_replicas, stack
from jpaged.execution.programs import Compile
from jpaged.execution.step import make_block_copy
from jpaged.execution.work.base import PoolWork, WorkContext
from jpaged.memory.copies import BlockCopy
from jpaged.scheduling.work import COPIES

BlockIds: TypeAlias = Int[np.ndarray, "*replicas groups copies"]


class Copies(PoolWork):
    """Makes the block copies of a step, in numbers padded to the most of any replica and group."""

    kind: ClassVar[str] = COPIES

    def __init__(self, context: WorkContext) -> None:
        spec, mesh = context.spec, context.mesh
        self._spec = spec
        self._mesh = mesh
        rows = context.settings.max_num_seqs
        self.sizes = tuple(dict.fromkeys([min(16, rows), rows])) if spec.views else ()
        made_of = ("copy", spec, mesh, context.kernel_impl)
        copy = make_block_copy(spec, mesh, kernel_impl=context.kernel_impl)
        self._copy = Program(copy, *context.on_compile, made_of, kind="copy", store=context.store)

    def calls(self, each: Sequence[Sequence[BlockCopy]]) -> Iterable[tuple[BlockIds, BlockIds]]:
        groups = range(len(self._spec.views))
        most = max(sum(copy.group == group for copy in copies) for copies in each for group in groups)
        size = next((s for s in self.sizes if s >= most), 1 << (most - 1).bit_length())
        yield stack(self._mesh, [copy_pairs(copies, self._spec, size) for copies in each])

    def run(self, pool: Pool, src: BlockIds, dst: BlockIds) -> Pool:
        """Copy whole blocks of the pool; -1 is padding."""
        copied: Pool = self._copy(("copy", src.shape[-1]), pool, src, dst)
        return copied

    def shapes(self) -> Iterator[tuple[str, Callable[[], Compile]]]:
        for size in self.sizes:
            ids = np.full((len(self._spec.views), size), -1, np.int32)
            ids, pool = stack(self._mesh, [ids] * num_replicas(self._mesh)), abstract_pool(self._spec, self._mesh)
            yield f"block copy x{size}", partial(self._copy.prepare, ("copy", size), pool, ids, ids)

    def close(self) -> None:
        self._copy.forget()


def copy_pairs(copies: Sequence[BlockCopy], spec: PoolSpec, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source and destination blocks, ``[groups, size]`` each; -1 is padding.

    Raises:
        RuntimeError: a block is out of the pool's range.
    """
    per_group = [[copy for copy in copies if copy.group == group] for group in range(len(spec.views))]
    pairs = np.full((2, len(per_group), size), -1, np.int32)
    for group, mine in enumerate(per_group):
        for i, copy in enumerate(mine):
            limit = spec.views[group][0]
            if not (0 <= copy.src < limit and 0 <= copy.dst < limit):
                raise RuntimeError(f"block copy {copy} is outside [0, {limit})")
            pairs[:, group, i] = copy.src, copy.dst
    return pairs[0], pairs[1]
