"""Keeps the state of recurrent layers: one block a running sequence, and checkpoints that later requests can start
from.

Which token's state lies in which block the host says (`jpaged.memory.policies.StateCheckpoints`): the table has an
entry for every block of tokens, and a block only at the entries where a checkpoint ends. Tokens read the state of the
entry that ends before them or holds the sequence's running state, and leave theirs in the entry they end in.

Where steps verify drafts a second table of each sequence holds the running states, one after every token that may
stand (`jpaged.memory.policies.VerifiedStates`); its blocks are of the same view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from jpaged.execution.caches.base import HostStep, LayerCache, LayerCall, Pool, Reads
from jpaged.execution.mesh import HostOrDevice, over_tensor
from jpaged.memory.layout import GroupLayout, GroupSpec
from jpaged.memory.policies import Policy, StateCheckpoints, VerifiedStates
from jpaged.model_api import TENSOR_AXIS, StateGroup
from pallas_kernels.recurrent.layout import CARRY, LANES, NEW, ROW_TILE, UNIT, StatePlace, Units


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
        layout: the layer group as it lies in the pool.
        checkpoints: block tables. Entry ``j`` holds the state after token ``(j + 1) * block_size`` once that is
            computed, and before then, where `ring` is None, the running state of the tokens up to there; entries
            without a block are passed over.
        ring: tables whose entry ``n % slots`` holds the state after ``n`` tokens where no checkpoint ends; None = steps
            verify no drafts.
    """

    layout: GroupLayout
    checkpoints: Int[np.ndarray, "seqs pages"]
    ring: Int[np.ndarray, "seqs slots"] | None = None

    def of(self, rows: slice | Int[np.ndarray, " some"]) -> StateTables:
        """Return the tables of some of the sequences."""
        return StateTables(self.layout, self.checkpoints[rows], None if self.ring is None else self.ring[rows])

    def holders(self, lengths: Int[np.ndarray, " seqs"]) -> Int[np.ndarray, " seqs"]:
        """Return, for each sequence, the block of the state after a number of tokens (1 or more); -1 = none."""
        table, size = self.checkpoints, self.layout.spec.block_size
        if self.ring is not None:
            entries = np.clip(lengths // size - 1, 0, table.shape[1] - 1)
            ends = np.where(lengths % size == 0, _entries(table, entries), -1)
            return np.where(ends >= 0, ends, _entries(self.ring, lengths % self.ring.shape[1]))
        first, policy = np.maximum(-(-lengths // size) - 1, 0), self.layout.spec.policy
        assert isinstance(policy, StateCheckpoints)
        found = self._next(first, policy.interval // size)
        # Inside a prompt checkpoints may lie further apart, as far as the whole of it where a request leaves no others.
        if (far := np.flatnonzero(found < 0)).size:
            found[far] = self.of(far)._next(first[far], table.shape[1])
        return found

    def _next(self, first: Int[np.ndarray, " seqs"], entries: int) -> Int[np.ndarray, " seqs"]:
        """Return the first block among a number of entries from `first` on; -1 = none."""
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
    most = most_units(step.padded_tokens, step.padded_seqs, tables.layout, verifies=verifies)
    return _padded(np.concatenate(units), num_decodes, most)


def most_units(tokens: int, seqs: int, layout: GroupLayout, *, verifies: bool = False) -> int:
    """Return the most units that `tokens` tokens of `seqs` sequences are cut into.

    A sequence's tokens are cut at multiples of `UNIT`, at regular checkpoints and at the ends of its own, and after
    each of the drafts where the step verifies any: there are no more of them than sequences that fit.
    """
    policy, size = layout.spec.policy.for_pool(layout.num_blocks), layout.spec.block_size
    assert isinstance(policy, StateCheckpoints)
    apart = policy.interval
    between = tokens // UNIT + (0 if apart % UNIT == 0 else tokens // apart + seqs)
    more_ends = min((policy.most_kept - 1) * seqs, tokens // size)
    return min(tokens, between + (5 if verifies else 4) * seqs + more_ends)


def token_by_token(whole: StateBatch, rows: slice) -> TokenByToken:
    """Return the tokens `rows` of a step, each as a separate unit; these are its launches' tokens, in order.

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
    _check(tables.layout, units[starts > 0, 2], units[:, 3])
    return units


def _pieces(tables: StateTables, start: int, stop: int, drafts: int, at: int) -> Int[np.ndarray, "units 4"]:
    """Cut the tokens of one sequence from position `start` to `stop`, which begin at token `at` of the step and end
    with so many drafts."""
    size, row = tables.layout.spec.block_size, tables.checkpoints[0]
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
    _check(tables.layout, units[:1, 2] if start else units[:0, 2], units[is_kept, 3])
    return units


def _check(layout: GroupLayout, *blocks: np.ndarray) -> None:
    if any((array < 0).any() for array in blocks):
        raise RuntimeError(f"a state of group {layout.spec.name} has no block")


def _padded(units: Int[np.ndarray, "units 4"], num_decodes: int, size: int) -> StateBatch:
    if len(units) > size:
        raise RuntimeError(f"{len(units)} units are more than the {size} of the batch")
    arrays = np.full((4, size), -1, np.int32)
    arrays[:2] = 0
    arrays[:, : len(units)] = units.T
    start, length, read, write = arrays
    counts = np.asarray(num_decodes, np.int32), np.asarray(len(units), np.int32)
    return StateBatch(start, length, read, write, *counts)


@dataclass(frozen=True)
class StateCache(LayerCache):
    """Serves layers that keep a state of fixed size instead of their tokens."""

    group: StateGroup
    Batch: ClassVar[type[tuple[Any, ...]]] = StateBatch

    @property
    def places(self) -> dict[str, StatePlace]:
        """Return where each part of a layer's state lies on one device."""
        places, row = {}, 0
        for part in self.group.parts:
            shape = (part.shape[0] // self.format.shards, *part.shape[1:])
            places[part.name] = place = StatePlace(row, shape, jnp.dtype(part.dtype))
            row += place.rows(self.format.dtype)
        return places

    @property
    def layer_shape(self) -> tuple[int, ...]:
        return (sum(place.rows(self.format.dtype) for place in self.places.values()), LANES)

    def pool_groups(self) -> tuple[GroupSpec, ...]:
        policies: dict[str, Policy] = {self.group.name: StateCheckpoints(self.format.state_interval)}
        if self.format.most_drafts:
            policies[f"{self.group.name}.verified"] = VerifiedStates(self.format.most_drafts + 1)
        number, padding = len(self.group.layers), ROW_TILE * 4 * LANES
        return tuple(self.spec(name, number, policy, row_bytes=padding) for name, policy in policies.items())

    def view(self, layout: GroupLayout) -> tuple[int, ...]:
        rows = layout.layer_bytes // (LANES * self.format.dtype.itemsize)
        return (layout.num_blocks, layout.padded_layers, rows, LANES)

    def reads(self) -> Reads:
        spec = self.pool_groups()[0]
        return Reads(2 * spec.real_bytes, 1, 0)  # read and written

    def table_width(self, spec: GroupSpec, max_model_len: int) -> int:
        return spec.policy.num_blocks(max_model_len, spec.block_size)

    def batch(self, step: HostStep, tables: Sequence[np.ndarray], layouts: Sequence[GroupLayout]) -> Any:
        return state_batch(step, StateTables(layouts[0], *tables))

    def one_by_one(self, arrays: Any, rows: slice | Int[np.ndarray, " rows"], seqs: Int[np.ndarray, " rows"]) -> Any:
        assert isinstance(rows, slice), "no model has states and images whose tokens see each other"
        return token_by_token(arrays, rows)

    def operate(
        self,
        call: LayerCall,
        pool: Pool,
        index: int | Int[Array, ""],
        part: str,
        kernel: Callable[..., tuple[Array, Array]],
        *operands: Array | None,
        axes: Sequence[int | None],
        out_axis: int,
        **options: Any,
    ) -> tuple[Pool, Array]:
        """Run a recurrence; see `jpaged.model_api.Recur`."""
        serial = isinstance(call.arrays, TokenByToken)
        arrays = call.arrays.units if serial else call.arrays
        one_token = call.max_query_len == 1
        place = self.places[part]

        def on_shard(pool, index, arrays, operands):
            units = Units(**arrays._asdict(), most=1 if one_token else UNIT, decodes_only=one_token and not serial)
            view, out = kernel(pool.reshape(call.views[0]), index, place, units, *operands, impl=call.impl, **options)
            return view.reshape(pool.shape), out

        whole, split = PartitionSpec(), PartitionSpec(TENSOR_AXIS)
        sharded = over_tensor(
            on_shard,
            call.mesh,
            in_specs=(split, whole, whole, tuple(_split_at(axis) for axis in axes)),
            out_specs=(split, _split_at(out_axis)),
        )
        return sharded(pool, jnp.asarray(index, jnp.int32), StateBatch(*map(jnp.asarray, arrays)), operands)


def _split_at(axis: int | None) -> PartitionSpec:
    return PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, TENSOR_AXIS)
