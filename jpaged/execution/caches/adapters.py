"""Keeps the matrices of low-rank adapters, and adds those of a step's requests to the model's (S-LoRA, 2023).

Which adapter lies in which blocks the host says (`jpaged.memory.shared_blocks`). Rank by rank, an adapter's numbers
fill as many blocks as they need at each site that it changes; `jpaged.execution.transfer.adapter_matrices` has them as
steps read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from jpaged.execution.caches.base import HostStep, LayerCache, LayerCall, Pool, Reads
from jpaged.execution.mesh import HostOrDevice, over_tensor, platform
from jpaged.memory.layout import GroupLayout, GroupSpec
from jpaged.memory.policies import Adapters
from jpaged.model_api import TENSOR_AXIS, AdapterGroup, AdapterSite
from jpaged.scheduling.held.adapters import AdapterUse
from jpaged.scheduling.step import ScheduledStep
from pallas_kernels.layout import LANES
from pallas_kernels.low_rank import AdaptedMatrix

Spec = jax.sharding.PartitionSpec
Matrices: TypeAlias = tuple[tuple[Array, Array], ...]
"""Operands of products with a step's adapters, site by site, for all layers: down ``[layers, adapters, parts * rank,
inputs]`` and up ``[layers, adapters, parts * rank, outputs]``, zero where a column is another part's."""

NO_PLACE = -1
"""The place of an adapter that goes to none."""


class AdapterPlaces:
    """Remembers which adapter is in which of `number` places; the one that was used least recently goes first.

    An adapter that stays where it is need not be read from the pool again, see `AdapterMatrices`.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._places: dict[bytes, int] = {}  # by digest, in the order of last use

    def of(self, digests: Iterable[bytes]) -> dict[bytes, int]:
        """Return the places of a step's adapters.

        Raises:
            RuntimeError: there are more different adapters than places.
        """
        step = list(dict.fromkeys(digests))
        if len(step) > self._number:
            raise RuntimeError(f"a step has {len(step)} different adapters, more than max_loras={self._number}")
        before = self._places
        others = {digest: place for digest, place in before.items() if digest not in step}
        now = {digest: before[digest] for digest in step if digest in before}
        free = [place for place in range(self._number) if place not in before.values()]
        for digest in step:
            if digest not in now:
                now[digest] = free.pop(0) if free else others.pop(next(iter(others)))
        self._places = others | now
        return now


class AdapterBatch(NamedTuple):
    """Holds a step's arrays for adapters; None where no row of the step has one.

    Attributes:
        table: blocks of each of the step's adapters, by place, site after site, as many as the largest rank takes; -1
            where the adapter has none, and in places that no row asks for. The host's; the step's program is given
            `matrices` for it.
        place: the place of the adapter that each row has; -1 = none.
        present: whether an adapter of the step changes a site.
        matrices: those of each place's adapter, of whatever was there last where the step has none.
    """

    table: Int[np.ndarray, "adapters blocks"] | None = None
    place: Int[HostOrDevice, " tokens"] | None = None
    present: Bool[HostOrDevice, "sites adapters"] | None = None
    matrices: Matrices | None = None


@dataclass(frozen=True)
class AdapterCache(LayerCache):
    """Serves adapters; no layer calls it: `adapted` changes the weights that all layers see in a step."""

    group: AdapterGroup
    Batch: ClassVar[type[tuple[Any, ...]]] = AdapterBatch
    by_token: ClassVar[tuple[str, ...] | None] = ("place",)
    skips_unread_rows: ClassVar[bool] = True

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
        """Return the number of blocks that an adapter of a rank takes at a site."""
        return -(-rank * site.row_elements(self.format.shards) * self.dtype.itemsize // self.block_bytes)

    @property
    def most_blocks(self) -> tuple[int, ...]:
        """Return how many blocks the largest rank takes at each site."""
        return tuple(self.site_blocks(site, self.group.rank) for site in self.group.sites)

    def pool_groups(self) -> tuple[GroupSpec, ...]:
        layer_bytes = self.block_bytes // self.group.block_layers
        policy = Adapters(self.group.adapters)
        return (GroupSpec(self.group.name, layer_bytes, self.group.block_layers, 1, policy),)

    def reads(self) -> Reads:
        return Reads(0, None, 0)  # steps read copies, see `jpaged.execution.transfer.adapter_matrices`

    def table_width(self, spec: GroupSpec, max_model_len: int) -> int:
        return 0  # adapters' blocks are in no sequence's table

    def memo(self) -> AdapterPlaces:
        return AdapterPlaces(self.group.adapters)

    def untabled_blocks(self, step: ScheduledStep) -> Iterable[int]:
        return (block for use in step.rows.get(Adapters.kind, ()) for block in use.held.blocks)

    def batch(self, step: HostStep, tables: Sequence[np.ndarray], layouts: Sequence[GroupLayout]) -> Any:
        uses: Sequence[AdapterUse] | None = step.rows.get(Adapters.kind)
        if uses is None:
            return AdapterBatch()
        (layout,), group = layouts, self.group
        most = self.most_blocks
        table = np.full((group.adapters, sum(most)), -1, np.int32)
        present = np.zeros((len(group.sites), group.adapters), bool)
        place_of_seq = np.full(step.padded_seqs, -1, np.int32)
        seq_of = {chunk.seq.seq_id: seq for seq, chunk in enumerate(step.chunks)}
        place_of = step.memo.of(use.adapter.digest for use in uses)
        for use in uses:
            place = place_of[use.adapter.digest]
            _fill(table[place], present[:, place], use.held.blocks, use.adapter.site_blocks, most, layout.num_blocks)
            place_of_seq[seq_of[use.seq_id]] = place
        rows = np.full(step.padded_tokens, -1, np.int32)
        rows[: len(step.seq_of_token)] = place_of_seq[step.seq_of_token]
        return AdapterBatch(table, rows, present)

    def operate(self, call: LayerCall, pool: Pool, index: Any, *operands: Any, **options: Any) -> tuple[Pool, Any]:
        raise NotImplementedError("no layer reads adapters by itself")

    def adapted(self, call: LayerCall, params: dict[Any, Any]) -> dict[Any, Any]:
        """Return the model's weights with those that the step's adapters may change as `AdaptedMatrix`.

        Args:
            params: the weights in dictionaries, see `jpaged.execution.params.plain_dict`; they are not changed.
        """
        arrays = call.arrays
        if arrays.matrices is None:
            return params
        for number, (site, (down, up)) in enumerate(zip(self.group.sites, arrays.matrices, strict=True)):
            for at, path in enumerate(site.paths):
                rows, present = jnp.asarray(arrays.place), jnp.asarray(arrays.present)[number]
                layer: int | None = at
                if site.stacked:  # each turn of a scan takes a layer's part of everything
                    rows, present = (jnp.broadcast_to(x, (site.layers, *x.shape)) for x in (rows, present))
                    layer = None
                in_turn = self.group.in_turn or platform(call.mesh) == "cpu"
                params = _replaced(params, path, down, up, rows, present, layer, in_turn)
        return params

    def matrices(self, mesh: jax.sharding.Mesh) -> Any:
        """Return shapes and shardings of `Matrices`."""
        adapters, rank = self.group.adapters, self.group.rank

        def of(shape: tuple[int, ...], spec: Spec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, self.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

        def of_site(site: AdapterSite) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
            (by_down, by_up), ranks = _splits(site), site.parts * rank
            return (
                of((site.layers, adapters, ranks, site.inputs), by_down),
                of((site.layers, adapters, ranks, site.outputs), by_up),
            )

        return tuple(map(of_site, self.group.sites))

    def filled(
        self,
        mesh: jax.sharding.Mesh,
        view: tuple[int, ...],
        matrices: Matrices,
        pool: Pool,
        blocks: Int[Array, " blocks"],
        place: Int[Array, ""],
    ) -> Matrices:
        """Return the matrices with those of the adapter that lies in these blocks in a place, or none in `NO_PLACE`.

        Args:
            view: the pool's shape as the group sees it, on each shard.
            blocks: as a row of `AdapterBatch.table`.
        """
        new, first = [], 0
        for site, width, (down, up) in zip(self.group.sites, self.most_blocks, matrices, strict=True):
            new.append(self._filled(mesh, view, site, down, up, pool, blocks[first : first + width], place))
            first += width
        return tuple(new)

    def _filled(
        self,
        mesh: jax.sharding.Mesh,
        view: tuple[int, ...],
        site: AdapterSite,
        down: Array,
        up: Array,
        pool: Pool,
        blocks: Int[Array, " blocks"],
        place: Int[Array, ""],
    ) -> tuple[Array, Array]:
        layers, parts, rank = site.layers, site.parts, self.group.rank
        inputs, outputs = site.local(self.format.shards)
        column = jnp.asarray(np.frombuffer(site.part_of_column, np.uint8))

        def on_shard(
            down: Array, up: Array, pool: Array, blocks: Array, place: Array, column: Array
        ) -> tuple[Array, Array]:
            stored = pool.reshape(view)[jnp.maximum(blocks, 0), : self.group.block_layers]
            stored = jnp.where((blocks >= 0)[:, None, None, None], stored, jnp.zeros_like(stored))
            numbers = self._numbers(stored.reshape(-1))[: rank * site.row_elements(self.format.shards)]
            ranks = numbers.reshape(rank, layers, -1)
            new_down = ranks[..., : parts * inputs].reshape(rank, layers, parts, inputs).transpose(1, 2, 0, 3)
            new_up = ranks[..., parts * inputs :].transpose(1, 0, 2)[:, None]
            if parts > 1:
                new_up = jnp.where(column == jnp.arange(parts)[:, None, None], new_up, jnp.zeros_like(new_up))
            pairs = new_down.reshape(layers, parts * rank, inputs), new_up.reshape(layers, parts * rank, outputs)
            return _put(down, pairs[0], place), _put(up, pairs[1], place)

        by_down, by_up = _splits(site)
        return over_tensor(
            on_shard,
            mesh,
            in_specs=(by_down, by_up, Spec(TENSOR_AXIS), Spec(), Spec(), Spec(by_up[3])),
            out_specs=(by_down, by_up),
        )(down, up, pool, blocks, place, column)

    def _numbers(self, stored: Shaped[Array, " elements"]) -> Shaped[Array, " numbers"]:
        """Return the pool's elements as numbers of the adapters' dtype."""
        if self.dtype == self.format.dtype:
            return stored
        ratio = self.dtype.itemsize // self.format.dtype.itemsize
        if ratio > 1:
            stored = stored.reshape(-1, ratio)
        return jax.lax.bitcast_convert_type(stored, self.dtype).reshape(-1)


def _put(matrices: Array, new: Array, place: Array) -> Array:
    """Return the matrices of all places with others in one, or as they are where it is `NO_PLACE`."""
    at = jnp.maximum(place, 0)
    there = jax.lax.dynamic_index_in_dim(matrices, at, 1, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(matrices, jnp.where(place >= 0, new, there), at, 1)


def _splits(site: AdapterSite) -> tuple[Spec, Spec]:
    """Return how a site's matrices down and up are spread over the shards."""
    by_inputs = TENSOR_AXIS if site.split == "inputs" else None
    by_outputs = TENSOR_AXIS if site.split == "outputs" else None
    return Spec(None, None, None, by_inputs), Spec(None, None, None, by_outputs)


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
