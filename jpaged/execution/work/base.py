"""The device's half of a kind of work on the pool; `jpaged.scheduling.work_kinds` has the host's half.

The runner turns the values of all replicas into plain arguments (`calls`), the worker announces these by the kind's
name and runs its programs on the pool, which they take as a donation (`run`). A new kind is one class, given to
`jpaged.execution.work.registry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from jax.sharding import Mesh

from jpaged.execution.batch import StepBatch
from jpaged.execution.caches.base import Pool
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.compile.store import ProgramStore
from jpaged.execution.programs import Compile, ModelPrograms
from jpaged.execution.step_settings import StepSettings
from jpaged.execution.transfer.block_mover import BlockMover
from jpaged.execution.transfer.host_store import HostStore
from jpaged.execution.transfer.tiers import BlockThread
from pallas_kernels.platform import Impl


@dataclass(frozen=True, kw_only=True)
class WorkContext:
    """Holds what kinds of work are made of.

    Attributes:
        settings: what the steps may be like.
        model: weights and programs of the model.
        on_compile: callbacks of programs for which requests wait, see `Program`.
        store: where programs are loaded from, or collected for; None = neither.
        can_swap: whether blocks may be swapped to host memory.
        tiers: write blocks to each tier below the pool and read them.
        examples: images to compile the encoder for, see `jpaged.model_api.TakesImages`.
        kernel_impl: which kernels run; None = what this process's platform is best at.
    """

    spec: PoolSpec
    mesh: Mesh
    settings: StepSettings
    model: ModelPrograms
    on_compile: tuple[Callable[[Hashable], None], Callable[[Hashable, float], None]]
    store: ProgramStore | None = None
    can_swap: bool = False
    tiers: Sequence[BlockThread] = ()
    examples: tuple[tuple[Mapping[str, np.ndarray], int], ...] = ()
    kernel_impl: Impl | None = None

    @property
    def moves_blocks(self) -> bool:
        """Tell whether steps may move blocks out of the pool and back."""
        return self.can_swap or bool(self.tiers)

    @cached_property
    def mover(self) -> BlockMover:
        """Return what copies blocks out of the pool and back."""
        return BlockMover(self.spec, self.mesh, *self.on_compile, store=self.store, moves=self.moves_blocks)

    @cached_property
    def host(self) -> HostStore:
        """Return where swapped blocks are kept."""
        return HostStore(self.mover)


class PoolWork(ABC):
    """One kind of work, for all replicas.

    Attributes:
        kind: its name in `jpaged.scheduling.work_kinds.KINDS`, which says when it runs.
        needed: whether its shapes are compiled before the first request.
    """

    kind: ClassVar[str]
    needed: ClassVar[bool] = False

    def __init__(self, context: WorkContext) -> None:  # noqa: B027  (some kinds need none of it)
        """Make the programs; nothing is compiled."""

    @abstractmethod
    def calls(self, each: Sequence[Sequence[Any]]) -> Iterable[tuple[Any, ...]]:
        """Return the arguments of each device call, for the values of each replica: numbers, text, NumPy arrays and
        sequences of them, as other processes make the calls too."""

    @abstractmethod
    def run(self, pool: Pool, *args: Any) -> Pool:
        """Make a call; return the pool, which is donated to programs that change it."""

    def shapes(self) -> Iterator[tuple[str, Callable[[], Compile]]]:
        """Yield every shape that can be compiled ahead: its name, and a call that traces it and returns a call that
        compiles it, in any thread."""
        yield from ()

    def given(self, pool: Pool, batch: StepBatch) -> StepBatch:
        """Return a step's arrays with those that the device has for it; the pool is only read."""
        return batch

    def release(self) -> None:  # noqa: B027
        """Free what is kept between steps; later steps begin anew."""

    def restart(self) -> None:
        """Begin anew with an empty pool."""
        self.release()

    def close(self) -> None:
        """Free memory and compiled programs; no call follows."""
        self.release()
