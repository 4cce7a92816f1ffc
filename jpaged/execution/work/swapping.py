"""Moves blocks of preempted requests to host memory and back (PagedAttention, section 4.5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int

from jpaged.execution.caches.base import Pool
from jpaged.execution.programs import Compile
from jpaged.execution.transfer.host_store import Moves
from jpaged.execution.work.base import PoolWork, WorkContext
from jpaged.memory.copies import HostBlock, SwapCopy
from jpaged.scheduling.work import SWAP_IN, SWAP_OUT


class SwapOut(PoolWork):
    """Forgets host blocks whose content is of no use any more, then starts copying blocks to host memory.

    Attributes:
        store: the blocks in host memory.
    """

    kind: ClassVar[str] = SWAP_OUT

    def __init__(self, context: WorkContext) -> None:
        self.store = context.host
        self._mover = context.mover
        self._moves = context.moves_blocks

    def calls(self, each: Sequence[Sequence[SwapCopy | HostBlock]]) -> Iterable[tuple[Any, Moves]]:
        dropped = [_rows([value for value in values if isinstance(value, HostBlock)], 2) for values in each]
        yield dropped, [_rows([value for value in values if isinstance(value, SwapCopy)], 3) for values in each]

    def run(self, pool: Pool, dropped: Sequence[Int[np.ndarray, "blocks 2"]], moves: Moves) -> Pool:
        self.store.forget(dropped)
        self.store.swap_out(pool, moves)
        return pool

    def shapes(self) -> Iterator[tuple[str, Callable[[], Compile]]]:
        """Yield the launches of all moves between the pool and another memory: those of the tiers are the same."""
        if self._moves:
            yield from self._mover.shapes()

    def release(self) -> None:
        self.store.forget_all()

    def close(self) -> None:
        self.release()
        self._mover.close()


class SwapIn(PoolWork):
    """Copies blocks back into the pool; host memory then forgets them."""

    kind: ClassVar[str] = SWAP_IN

    def __init__(self, context: WorkContext) -> None:
        self._store = context.host

    def calls(self, each: Sequence[Sequence[SwapCopy]]) -> Iterable[tuple[Moves]]:
        yield ([_rows(moves, 3) for moves in each],)

    def run(self, pool: Pool, moves: Moves) -> Pool:
        return self._store.swap_in(pool, moves)


def _rows(values: Sequence[tuple[int, ...]], width: int) -> Int[np.ndarray, "values width"]:
    return np.array(values, np.int32).reshape(len(values), width)
