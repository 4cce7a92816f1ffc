"""Cuts a step into units of one sequence each, which say from which block a state comes and in which it is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jpaged.execution.arrays import HostOrDevice
from jpaged.execution.caches.base import HostStep
from jpaged.memory.layout import GroupLayout
from jpaged.memory.policies import StateCheckpoints
from pallas_kernels.recurrent.layout import CARRY, NEW, UNIT


class StateBatch(NamedTuple):
    """Holds a step's units, see `pallas_kernels.recurrent.layout.Units`."""

    start: Int[HostOrDevice, " units"]
    length: Int[HostOrDevice, " units"]
    read: Int[HostOrDevice, " units"]
    write: Int[HostOrDevice, " units"]
    num_decodes: Int[HostOrDevice, ""]
    num_units: Int[HostOrDevice, ""]


class TokenByToken(NamedTuple):
    """Holds units of one token each that are computed one after the other, for a deterministic step."""

    units: StateBatch


@dataclass(frozen=True)
class StateTables:
    """Says where the states of a step's sequences lie.

    Attributes:
        plan: the layer group as it lies in the pool.
        checkpoints: block tables. Entry ``j`` holds the state after token ``(j + 1) * block_size`` once that is
            computed, and before then, where `ring` is None, the running state of the tokens up to there; entries
            without a block are passed over.
        ring: tables whose entry ``n % slots`` holds the state after ``n`` tokens where no checkpoint ends; None = steps
            verify no drafts.
    """

    plan: GroupLayout
    checkpoints: Int[np.ndarray, "seqs pages"]
    ring: Int[np.ndarray, "seqs slots"] | None = None

    def of(self, rows: slice | Int[np.ndarray, " some"]) -> StateTables:
        """Return the tables of some of the sequences."""
        return StateTables(self.plan, self.checkpoints[rows], None if self.ring is None else self.ring[rows])

    def holders(self, lengths: Int[np.ndarray, " seqs"]) -> Int[np.ndarray, " seqs"]:
        """Return the block of the state after so many tokens of each sequence, at least one; -1 = none."""
        table, size = self.checkpoints, self.plan.spec.block_size
        if self.ring is not None:
            entries = np.clip(lengths // size - 1, 0, table.shape[1] - 1)
            ends = np.where(lengths % size == 0, _entries(table, entries), -1)
            return np.where(ends >= 0, ends, _entries(self.ring, lengths % self.ring.shape[1]))
        first, policy = np.maximum(-(-lengths // size) - 1, 0), self.plan.spec.policy
        assert isinstance(policy, StateCheckpoints)
        found = self._next(first, policy.interval // size)
        if (far := np.flatnonzero(found < 0)).size:  # inside a prompt, where checkpoints may lie further apart
            found[far] = self.of(far)._next(first[far], policy.entries_apart(size))
        return found

    def _next(self, first: Int[np.ndarray, " seqs"], entries: int) -> Int[np.ndarray, " seqs"]:
        """Return the first block among so many entries from `first` on; -1 = none."""
        table = self.checkpoints
        near = first[:, None] + np.arange(min(table.shape[1], entries))
        blocks = np.where(
            near < table.shape[1], np.take_along_axis(table, np.minimum(near, table.shape[1] - 1), axis=1), -1
        )
        return _entries(blocks, np.argmax(blocks >= 0, axis=1))


def _entries(table: Int[np.ndarray, "seqs width"], entries: Int[np.ndarray, " seqs"]) -> Int[np.ndarray, " seqs"]:
    return np.take_along_axis(table, entries[:, None], axis=1)[:, 0]


def state_batch(step: HostStep, tables: StateTables) -> StateBatch:
    """Return the units of a step; each draft is a unit, and so is the token before it.

    Raises:
        RuntimeError: a state has no block.
    """
    num_decodes = int(np.searchsorted(step.lengths, 1, side="right"))  # chunks of one token come first
    units = [_decodes(step, tables.of(slice(num_decodes)))]
    at = num_decodes
    for number in range(num_decodes, len(step.lengths)):
        start, length = int(step.starts[number]), int(step.lengths[number])
        drafts = len(step.chunks[number].drafts)
        units.append(_pieces(tables.of(slice(number, number + 1)), start, start + length, drafts, at))
        at += length
    verifies = tables.ring is not None
    most = most_units(step.padded_tokens, step.padded_seqs, tables.plan, verifies=verifies)
    return _padded(np.concatenate(units), num_decodes, most)


def most_units(tokens: int, seqs: int, plan: GroupLayout, *, verifies: bool = False) -> int:
    """Return the most units that so many tokens of so many sequences are cut into.

    A sequence's tokens are cut at multiples of `UNIT`, at regular checkpoints and at up to two ends of its own, and
    behind each of the drafts where the step verifies any: there are no more of them than sequences that fit.
    """
    assert isinstance(plan.spec.policy, StateCheckpoints)
    apart = plan.spec.policy.interval
    between = tokens // UNIT + (0 if apart % UNIT == 0 else tokens // apart + seqs)
    return min(tokens, between + (5 if verifies else 4) * seqs)


def token_by_token(whole: StateBatch, rows: slice) -> TokenByToken:
    """Return the tokens `rows` of a step, each as a unit of its own; these are its launches' tokens, in order.

    A state that the next launch starts from is left in the block that its unit, or one that follows it, ends in.
    """
    count = int(whole.num_units)
    start, length, read, write = (np.asarray(array[:count]) for array in whole[:4])
    ends_in = write.copy()  # the block of the first write from each unit on
    for unit in reversed(range(count - 1)):
        if ends_in[unit] < 0:
            ends_in[unit] = ends_in[unit + 1]
    last = min(rows.stop, int(start[-1] + length[-1]) if count else 0)
    units = np.zeros((max(0, last - rows.start), 4), np.int32)
    for place, token in enumerate(range(rows.start, last)):
        unit = int(np.searchsorted(start, token, side="right")) - 1
        follows = token > start[unit] or read[unit] == CARRY
        ends = token == start[unit] + length[unit] - 1
        carries = _left_in(ends_in, write, unit, token == start[unit]) if place == 0 else CARRY
        reads = carries if follows else read[unit]
        stays = token == rows.stop - 1 and not (ends and write[unit] >= 0) and _goes_on(read, unit, ends)
        units[place] = place, 1, reads, ends_in[unit] if stays else write[unit] if ends else -1
    return TokenByToken(_padded(units, 0, rows.stop - rows.start))


def _left_in(ends_in: np.ndarray, write: np.ndarray, unit: int, begins: bool) -> int:
    """Return the block in which the launch before left the state that a token of `unit`, its first one or not, carries
    on from."""
    return write[unit - 1] if begins and write[unit - 1] >= 0 else ends_in[unit]


def _goes_on(read: np.ndarray, unit: int, ends: bool) -> bool:
    """Tell whether a token of `unit`, its last one or not, has one that carries on from it."""
    return not ends or (unit + 1 < len(read) and read[unit + 1] == CARRY)


def _decodes(step: HostStep, tables: StateTables) -> Int[np.ndarray, "units 4"]:
    count = len(tables.checkpoints)
    starts = step.starts[:count]
    units = np.empty((count, 4), np.int32)
    units[:, 0], units[:, 1] = np.arange(count), 1
    units[:, 2] = np.where(starts > 0, tables.holders(starts), NEW)
    units[:, 3] = tables.holders(starts + 1)
    _check(tables.plan, units[starts > 0, 2], units[:, 3])
    return units


def _pieces(tables: StateTables, start: int, stop: int, drafts: int, at: int) -> Int[np.ndarray, "units 4"]:
    """Cut the tokens of one sequence from position `start` to `stop`, which begin at token `at` of the step and end
    with so many drafts."""
    size, row = tables.plan.spec.block_size, tables.checkpoints[0]
    entries = np.arange(start // size, -(-stop // size))
    checkpoints = (entries[row[entries] >= 0] + 1) * size
    kept = np.union1d(checkpoints[checkpoints < stop], np.arange(stop - drafts, stop + 1))
    regular = np.arange(start // UNIT + 1, -(-stop // UNIT)) * UNIT
    ends = np.union1d(kept, regular).astype(np.int64)
    starts = np.concatenate([[start], ends[:-1]])
    every = tables.of(np.zeros(len(ends), np.int64))
    units = np.empty((len(ends), 4), np.int32)
    units[:, 0], units[:, 1], units[:, 2] = starts - start + at, ends - starts, CARRY
    units[0, 2] = tables.holders(np.asarray([start]))[0] if start else NEW
    units[:, 3] = np.where(is_kept := np.isin(ends, kept), every.holders(ends), -1)
    _check(tables.plan, units[:1, 2] if start else units[:0, 2], units[is_kept, 3])
    return units


def _check(plan: GroupLayout, *blocks: np.ndarray) -> None:
    if any((array < 0).any() for array in blocks):
        raise RuntimeError(f"a state of group {plan.spec.name} has no block")


def _padded(units: Int[np.ndarray, "units 4"], num_decodes: int, size: int) -> StateBatch:
    if len(units) > size:
        raise RuntimeError(f"{len(units)} units are more than the {size} of the batch")
    arrays = np.full((4, size), -1, np.int32)
    arrays[:2] = 0
    arrays[:, : len(units)] = units.T
    start, length, read, write = arrays
    counts = np.asarray(num_decodes, np.int32), np.asarray(len(units), np.int32)
    return StateBatch(start, length, read, write, *counts)
