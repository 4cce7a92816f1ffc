"""Gives each token of a step a slot of its block, for layers that keep something of every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int

from jpaged.execution.arrays import HostOrDevice
from jpaged.execution.caches.base import HostStep, LayerCache
from jpaged.memory.layout import GroupLayout


class AttentionBatch(NamedTuple):
    """Holds a step's arrays for one group of attention layers.

    Attributes:
        table: logical block -> physical block; -1 where there is none.
        slots: where each token's KV goes; padding tokens lie out of range and are dropped.
        last_keys: position of the last token that each token sees; None = its own.
    """

    table: Int[HostOrDevice, "seqs pages"]
    slots: Int[HostOrDevice, " tokens"]
    last_keys: Int[HostOrDevice, " tokens"] | None = None


class TokenSlots(LayerCache):
    """Serves layers that keep something of each token in a slot of its block."""

    Batch: ClassVar[type[tuple[Any, ...]]] = AttentionBatch

    def batch(self, step: HostStep, tables: Sequence[np.ndarray], plans: Sequence[GroupLayout]) -> Any:
        (table,), (plan,) = tables, plans
        return AttentionBatch(table, write_slots(step, table, plan, step.positions))

    def one_by_one(self, arrays: Any, rows: slice | Int[np.ndarray, " rows"], seqs: Int[np.ndarray, " rows"]) -> Any:
        return AttentionBatch(arrays.table[seqs], arrays.slots[rows])

    def together(self, arrays: Any, rows: slice, seq: int) -> Any:
        last = None if arrays.last_keys is None else arrays.last_keys[rows]
        return AttentionBatch(arrays.table[seq : seq + 1], arrays.slots[rows], last)

    def last_seen(self, arrays: Any) -> Int[np.ndarray, " tokens"] | None:
        return arrays.last_keys


def write_slots(
    step: HostStep, table: np.ndarray, plan: GroupLayout, places: Int[np.ndarray, " tokens"]
) -> Int[np.ndarray, " padded_tokens"]:
    """Return the slots of the pool for the step's tokens; `places` are their places in their sequences' blocks.

    Raises:
        RuntimeError: a token has no block to be written to.
    """
    size = plan.spec.block_size
    blocks = table[step.seq_of_token, places // size]
    if blocks.size and blocks.min() < 0:
        raise RuntimeError(f"a token of group {plan.spec.name} has no block to be written to")
    slots = np.full(step.padded_tokens, plan.num_blocks * size, np.int32)
    slots[: len(places)] = blocks * size + places % size
    return slots


def last_keys(step: HostStep) -> Int[np.ndarray, " padded_tokens"] | None:
    """Return the position of the last token that each of the step's tokens sees: tokens of a whole image see all of
    it. None where the step has no place for images."""
    if step.images is None:
        return None
    last = np.zeros(step.padded_tokens, np.int32)
    last[: len(step.positions)] = step.positions
    for image in step.images:
        if image.read.image.whole:
            last[image.rows] = image.read.image.stop - 1
    return last
