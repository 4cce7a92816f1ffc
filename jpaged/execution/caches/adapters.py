"""Keeps the matrices of low-rank adapters, and puts those of a step's requests beside the model's (S-LoRA, 2023).

Which adapter lies in which blocks the host says (`jpaged.memory.adapters`). Rank by rank, an adapter's numbers fill as
many blocks as they need at each site that it changes; a step gathers the blocks of its adapters before the first layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jpaged.execution.arrays import HostOrDevice
from jpaged.execution.caches.base import HostStep, LayerCache, LayerCall, Pool, Reads
from jpaged.execution.mesh import platform
from jpaged.execution.replicas import over_tensor
from jpaged.memory.layout import GroupLayout, GroupSpec
from jpaged.memory.policies import Adapters
from jpaged.model_api import TENSOR_AXIS, AdapterGroup, AdapterSite
from pallas_kernels.layout import LANES
from pallas_kernels.low_rank import AdaptedMatrix

Spec = jax.sharding.PartitionSpec


class AdapterBatch(NamedTuple):
    """Holds a step's arrays for adapters; None where no row of the step has one.

    Attributes:
        table: blocks of each of the step's adapters, site after site, as many as the largest rank takes; -1 where the
            adapter has none.
        slot: which of these adapters each row has; -1 = none.
        present: whether an adapter of the step changes a site.
    """

    table: Int[HostOrDevice, "adapters blocks"] | None = None
    slot: Int[HostOrDevice, " tokens"] | None = None
    present: Bool[HostOrDevice, "sites adapters"] | None = None


@dataclass(frozen=True)
class AdapterCache(LayerCache):
    """Serves adapters; no layer calls it: `adapted` changes the weights that all layers see in a step."""

    group: AdapterGroup
    Batch: ClassVar[type[tuple[Any, ...]]] = AdapterBatch

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of the matrices."""
        return jnp.dtype(self.group.dtype)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        return (self.group.block_rows, LANES)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block that an adapter uses, on each shard."""
        return self.group.block_layers * self.group.block_rows * LANES * self.format.dtype.itemsize

    def site_blocks(self, site: AdapterSite, rank: int) -> int:
        """Return how many blocks so many ranks take at a site."""
        return -(-rank * site.row_elements(self.format.shards) * self.dtype.itemsize // self.block_bytes)

    @property
    def most_blocks(self) -> tuple[int, ...]:
        """Return how many blocks the largest rank takes at each site."""
        return tuple(self.site_blocks(site, self.group.rank) for site in self.group.sites)

    def pool_groups(self) -> tuple[GroupSpec, ...]:
        layer_bytes = self.block_bytes // self.group.block_layers
        return (GroupSpec(self.group.name, layer_bytes, self.group.block_layers, 1, Adapters()),)

    def reads(self) -> Reads:
        return Reads(0, None, 0)  # once a step, whatever its tokens

    def table_width(self, spec: GroupSpec, max_model_len: int) -> int:
        return 0  # adapters' blocks are in no sequence's table

    def batch(self, step: HostStep, tables: Sequence[np.ndarray], plans: Sequence[GroupLayout]) -> Any:
        if step.adapted is None:
            return AdapterBatch()
        (plan,), group = plans, self.group
        most = self.most_blocks
        table = np.full((group.adapters, sum(most)), -1, np.int32)
        present = np.zeros((len(group.sites), group.adapters), bool)
        slots: dict[bytes, int] = {}
        slot_of_seq = np.full(step.padded_seqs, -1, np.int32)
        for seq, use in step.adapted.items():
            slot = slots.get(use.adapter.digest)
            if slot is None:
                slot = slots[use.adapter.digest] = len(slots)
                if slot >= group.adapters:
                    raise RuntimeError(f"a step has more than max_loras={group.adapters} different adapters")
                _fill(table[slot], present[:, slot], use.held.blocks, use.adapter.site_blocks, most, plan.num_blocks)
            slot_of_seq[seq] = slot
        rows = np.full(step.padded_tokens, -1, np.int32)
        rows[: len(step.seq_of_token)] = slot_of_seq[step.seq_of_token]
        return AdapterBatch(table, rows, present)

    def one_by_one(self, arrays: Any, rows: slice | np.ndarray, seqs: Int[np.ndarray, " rows"]) -> Any:
        return arrays if arrays.slot is None else arrays._replace(slot=arrays.slot[rows])

    def operate(self, call: LayerCall, pool: Pool, index: Any, *operands: Any, **options: Any) -> tuple[Pool, Any]:
        raise NotImplementedError("no layer reads adapters by itself")

    def adapted(self, call: LayerCall, pool: Pool, params: dict[Any, Any]) -> dict[Any, Any]:
        """Return the model's weights with those that the step's adapters may change as `AdaptedMatrix`.

        Args:
            params: the weights in dictionaries, see `jpaged.execution.params.plain_dict`; they are not changed.
        """
        arrays = call.arrays
        if arrays.table is None:
            return params
        first = 0
        for number, (site, blocks) in enumerate(zip(self.group.sites, self.most_blocks, strict=True)):
            table = jnp.asarray(arrays.table)[:, first : first + blocks]
            down, up = self._gathered(call, pool, table, site)
            for at, path in enumerate(site.paths):
                rows, present = jnp.asarray(arrays.slot), jnp.asarray(arrays.present)[number]
                layer: int | None = at
                if site.stacked:  # each turn of a scan takes a layer's part of everything
                    rows, present = (jnp.broadcast_to(x, (site.layers, *x.shape)) for x in (rows, present))
                    layer = None
                in_turn = self.group.in_turn or platform(call.mesh) == "cpu"
                params = _replaced(params, path, down, up, rows, present, layer, in_turn)
            first += blocks
        return params

    def _gathered(
        self, call: LayerCall, pool: Pool, table: Int[Array, "adapters blocks"], site: AdapterSite
    ) -> tuple[Array, Array]:
        """Return a site's matrices of the step's adapters, for all layers: down ``[layers, adapters, inputs, parts *
        rank]`` and up ``[layers, adapters, parts * rank, outputs]``, zero where a column is another part's."""
        layers, parts, rank = site.layers, site.parts, self.group.rank
        inputs, outputs = site.local(self.format.shards)
        column = jnp.asarray(np.frombuffer(site.part_of_column, np.uint8))

        def on_shard(pool: Array, table: Array, column: Array) -> tuple[Array, Array]:
            blocks = pool.reshape(call.views[0])[jnp.maximum(table, 0), : self.group.block_layers]
            blocks = jnp.where((table >= 0)[:, :, None, None, None], blocks, jnp.zeros_like(blocks))
            flat = self._numbers(blocks.reshape(len(table), -1))
            ranks = flat[:, : rank * site.row_elements(self.format.shards)].reshape(len(table), rank, layers, -1)
            down = ranks[..., : parts * inputs].reshape(len(table), rank, layers, parts, inputs)
            down = down.transpose(2, 0, 4, 3, 1).reshape(layers, len(table), inputs, parts * rank)
            up = ranks[..., parts * inputs :].transpose(2, 0, 1, 3)[:, :, None]
            if parts > 1:
                up = jnp.where(column == jnp.arange(parts)[:, None, None], up, jnp.zeros_like(up))
            return down, up.reshape(layers, len(table), parts * rank, outputs)

        by_inputs = TENSOR_AXIS if site.split == "inputs" else None
        by_outputs = TENSOR_AXIS if site.split == "outputs" else None
        return over_tensor(
            on_shard,
            call.mesh,
            in_specs=(Spec(TENSOR_AXIS), Spec(), Spec(by_outputs)),
            out_specs=(Spec(None, None, by_inputs, None), Spec(None, None, None, by_outputs)),
        )(pool, table, column)

    def _numbers(self, stored: Array) -> Array:
        """Return the pool's elements, ``[adapters, elements]``, as numbers of the adapters' dtype."""
        if self.dtype == self.format.dtype:
            return stored
        ratio = self.dtype.itemsize // self.format.dtype.itemsize
        if ratio > 1:
            stored = stored.reshape(len(stored), -1, ratio)
        return jax.lax.bitcast_convert_type(stored, self.dtype).reshape(len(stored), -1)


def _fill(
    table: Int[np.ndarray, " blocks"],
    present: Bool[np.ndarray, " sites"],
    blocks: Sequence[int],
    site_blocks: Sequence[int],
    most: Sequence[int],
    num_blocks: int,
) -> None:
    """Put an adapter's blocks into its row of the table.

    Raises:
        RuntimeError: one is out of the pool's range.
    """
    if not all(0 <= block < num_blocks for block in blocks):
        raise RuntimeError(f"blocks {min(blocks)}..{max(blocks)} of an adapter are not in [0, {num_blocks})")
    first = taken = 0
    for site, (count, width) in enumerate(zip(site_blocks, most, strict=True)):
        table[first : first + count] = blocks[taken : taken + count]
        present[site] = count > 0
        first, taken = first + width, taken + count


def _replaced(params: dict[Any, Any], path: Sequence[str | int], *parts: Any) -> dict[Any, Any]:
    """Return a copy of nested dictionaries in which the matrix at `path` is an `AdaptedMatrix` of it and `parts`."""
    if not path:
        return AdaptedMatrix(params, *parts)  # type: ignore[return-value]
    return {**params, path[0]: _replaced(params[path[0]], path[1:], *parts)}
