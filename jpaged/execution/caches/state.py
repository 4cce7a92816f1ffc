"""Keeps the state of recurrent layers: one block a running sequence, and checkpoints that later requests can start
from.

Which token's state lies in which block the host says (`jpaged.memory.policies.StateCheckpoints`): the table has an
entry for every block of tokens, and a block only at the entries where a checkpoint ends. Tokens read the state of the
entry that ends before them or holds the sequence's running state, and leave theirs in the entry they end in.

Where steps verify drafts a second table of each sequence holds the running states, one behind every token that may
stand (`jpaged.memory.policies.VerifiedStates`); its blocks are of the same view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from jpaged.execution.caches.base import HostStep, LayerCache, LayerCall, Pool, Reads
from jpaged.execution.caches.state_units import StateBatch, StateTables, TokenByToken, state_batch, token_by_token
from jpaged.execution.replicas import over_tensor
from jpaged.memory.layout import GroupLayout, GroupSpec
from jpaged.memory.policies import Policy, StateCheckpoints, VerifiedStates
from jpaged.model_api import TENSOR_AXIS, StateGroup
from pallas_kernels.recurrent.layout import LANES, ROW_TILE, UNIT, StatePlace, Units


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

    def view(self, plan: GroupLayout) -> tuple[int, ...]:
        rows = plan.layer_bytes // (LANES * self.format.dtype.itemsize)
        return (plan.num_blocks, plan.padded_layers, rows, LANES)

    def reads(self) -> Reads:
        spec = self.pool_groups()[0]
        return Reads(2 * spec.real_bytes, 1, 0)  # read and written

    def table_width(self, spec: GroupSpec, max_model_len: int) -> int:
        return spec.policy.num_blocks(max_model_len, spec.block_size)

    def batch(self, step: HostStep, tables: Sequence[np.ndarray], plans: Sequence[GroupLayout]) -> Any:
        return state_batch(step, StateTables(plans[0], *tables))

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
