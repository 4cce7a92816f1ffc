"""The device's half of steering: the layer group by which a model asks for it, and what its layers do with blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from held_kind.holds import Steering
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jpaged.execution.caches.base import HostStep, LayerCache, LayerCall, Pool, Reads
from jpaged.execution.mesh import HostOrDevice, over_tensor
from jpaged.memory.layout import GroupLayout, GroupSpec
from jpaged.model_api import TENSOR_AXIS, LayerGroup
from jpaged.scheduling import ScheduledStep


@dataclass(frozen=True)
class SteeringGroup(LayerGroup):
    """Asks for steering.

    Attributes:
        width: numbers of a vector.
        most: most vectors of a request.
    """

    width: int
    most: int

    @property
    def kind(self) -> str:
        return Steering.kind


class SteeringBatch(NamedTuple):
    """A step's array: the blocks of the vectors that each token gets; -1 after them."""

    blocks: Int[HostOrDevice, "tokens vectors"]


@dataclass(frozen=True)
class SteeringCache(LayerCache):
    """Adds the vectors of each token's request to the token."""

    group: SteeringGroup
    Batch: ClassVar[type[tuple[Any, ...]]] = SteeringBatch
    by_token: ClassVar[tuple[str, ...] | None] = ("blocks",)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        return (self.group.width // 128, 128)

    def pool_groups(self) -> tuple[GroupSpec, ...]:
        return (GroupSpec(self.group.name, 4 * self.group.width, 1, 1, Steering(self.group.most)),)

    def reads(self) -> Reads:
        return Reads(0, None, 0)

    def table_width(self, spec: GroupSpec, max_model_len: int) -> int:
        return 0  # the blocks are in no sequence's table

    def untabled_blocks(self, step: ScheduledStep) -> Iterable[int]:
        return (block for row in step.rows.get(Steering.kind, ()) for block in row.blocks)

    def batch(self, step: HostStep, tables: Sequence[np.ndarray], layouts: Sequence[GroupLayout]) -> SteeringBatch:
        of_seq = {row.seq_id: row.blocks for row in step.rows[Steering.kind]}
        blocks = np.full((step.padded_tokens, self.group.most), -1, np.int32)
        ends = np.cumsum(step.lengths)
        for chunk, start, stop in zip(step.chunks, ends - step.lengths, ends, strict=True):
            mine = of_seq.get(chunk.seq.seq_id, ())
            blocks[start:stop, : len(mine)] = mine
        return SteeringBatch(blocks)

    def operate(
        self, call: LayerCall, pool: Pool, index: int | Int[Array, ""], x: Float[Array, "tokens width"]
    ) -> tuple[Pool, Float[Array, "tokens width"]]:
        def on_shard(pool, blocks):
            vectors = pool.reshape(call.views[0])[jnp.maximum(blocks, 0), 0].reshape(*blocks.shape, -1)
            return jnp.where(blocks[..., None] >= 0, vectors, 0).sum(axis=1)

        shard, whole = PartitionSpec(TENSOR_AXIS), PartitionSpec()
        sharded = over_tensor(on_shard, call.mesh, in_specs=(shard, whole), out_specs=whole)
        return pool, x + sharded(pool, jnp.asarray(call.arrays.blocks))
