"""Lists the kinds of work on the pool. A new kind is one row here and one in `jpaged.execution.work.registry`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jpaged.memory import MemoryManager
from jpaged.scheduling.step import StepPlan
from jpaged.scheduling.work import COPIES, ENCODES, FROM_TIERS, LOADS, SWAP_IN, SWAP_OUT, TO_TIERS, Phase


class WorkKind(NamedTuple):
    """A kind of work.

    Attributes:
        phase: when it runs.
        make: returns its values for a step when planning ends; None = all are planned before.
    """

    phase: Phase
    make: Callable[[MemoryManager, StepPlan], Iterable[Any]] | None = None


def _dropped(memory: MemoryManager, plan: StepPlan) -> Iterable[Any]:
    return memory.swap_space.take_dropped()


def _to_tiers(memory: MemoryManager, plan: StepPlan) -> Iterable[Any]:
    return () if memory.tiers is None else memory.tiers.take_writes()


def _from_tiers(memory: MemoryManager, plan: StepPlan) -> Iterable[Any]:
    return () if memory.tiers is None else memory.tiers.take_fills()


KINDS = {
    TO_TIERS: WorkKind(Phase.OUT, _to_tiers),
    SWAP_OUT: WorkKind(Phase.OUT, _dropped),
    SWAP_IN: WorkKind(Phase.IN),
    FROM_TIERS: WorkKind(Phase.IN, _from_tiers),
    COPIES: WorkKind(Phase.COPY),
    ENCODES: WorkKind(Phase.MAKE),
    LOADS: WorkKind(Phase.MAKE),
}
"""The kinds by name."""


def make_work(memory: MemoryManager, plan: StepPlan) -> None:
    """Add to a step what the kinds make when planning ends."""
    for name, kind in KINDS.items():
        if kind.make is not None:
            plan.add_work(name, kind.make(memory, plan))
