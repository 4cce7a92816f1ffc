"""Keeps a vector of each sequence's newest token, which the token after it reads.

Blocks are those of a window of two tokens (`jpaged.memory.policies.SlidingWindow`), so a prefix may end at every block.
A block has no place for each of its tokens: it has as many as a step may take back, one more than the most drafts, and
position ``p`` lies in place ``p % places``. A full block so keeps the vector of its last token, which is all that a
prefix that ends there needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jpaged.execution.caches.base import HostStep, LayerCache, LayerCall, Pool, Reads
from jpaged.execution.mesh import HostOrDevice, over_tensor
from jpaged.memory.layout import GroupLayout, GroupSpec
from jpaged.memory.policies import SlidingWindow
from jpaged.model_api import TENSOR_AXIS, PreviousTokenGroup
from pallas_kernels.recurrent.layout import LANES, ROW_TILE, StatePlace, read_states, write_states

_PADDING = -1


class PreviousTokenBatch(NamedTuple):
    """Holds a step's arrays.

    Attributes:
        first: the step's row of each sequence's first token; out of range for padding.
        read, read_place: block and place of the vector before it; a block of -1 = there is none.
        write, write_place: block and place that take each token's vector. A block ``b`` that a later token of the step
            writes the same place of is given as ``-2 - b``, and one of padding as -1; neither is written.
    """

    first: Int[HostOrDevice, " seqs"]
    read: Int[HostOrDevice, " seqs"]
    read_place: Int[HostOrDevice, " seqs"]
    write: Int[HostOrDevice, " tokens"]
    write_place: Int[HostOrDevice, " tokens"]


@dataclass(frozen=True)
class PreviousTokenCache(LayerCache):
    """Serves layers that read a vector of the token before each token."""

    group: PreviousTokenGroup
    Batch: ClassVar[type[tuple[Any, ...]]] = PreviousTokenBatch

    @property
    def places(self) -> int:
        """Return how many vectors a block holds."""
        return self.format.most_drafts + 1

    @property
    def place(self) -> StatePlace:
        """Return how one vector's part on one device lies there."""
        columns = -(-self.group.width // self.format.shards)
        return StatePlace(0, (columns,), jnp.dtype(self.group.dtype))

    @property
    def layer_shape(self) -> tuple[int, ...]:
        return (self.place.rows(self.format.dtype), LANES)

    def pool_groups(self) -> tuple[GroupSpec, ...]:
        # The places of a block are what the layers of other kinds' are.
        policy, padding = SlidingWindow(2), ROW_TILE * 4 * LANES
        return (self.spec(self.group.name, self.places, policy, row_bytes=padding),)

    def view(self, layout: GroupLayout) -> tuple[int, ...]:
        rows = layout.layer_bytes // (LANES * self.format.dtype.itemsize)
        return (layout.num_blocks, layout.padded_layers, rows, LANES)

    def reads(self) -> Reads:
        (spec,) = self.pool_groups()
        return Reads(2 * spec.layer_bytes, 1, 0)  # read and written

    def batch(self, step: HostStep, tables: Sequence[np.ndarray], layouts: Sequence[GroupLayout]) -> Any:
        (table,), (layout,), places = tables, layouts, self.places
        size, starts, lengths = layout.spec.block_size, step.starts, step.lengths
        first = np.full(step.padded_seqs, step.padded_tokens, np.int32)
        first[: len(starts)] = np.cumsum(lengths) - lengths
        read, read_place = np.full(step.padded_seqs, _PADDING, np.int32), np.zeros(step.padded_seqs, np.int32)
        seqs = np.flatnonzero(starts)
        before = starts[seqs] - 1
        read[seqs], read_place[seqs] = table[seqs, before // size], before % places
        positions = step.positions
        blocks = table[step.seq_of_token, positions // size]
        if (read[seqs] < 0).any() or (blocks < 0).any():
            raise RuntimeError(f"a token of group {layout.spec.name} has no block")
        last = np.minimum((starts + lengths)[step.seq_of_token], (positions // size + 1) * size)
        write, write_place = np.full((2, step.padded_tokens), _PADDING, np.int32)
        write[: len(positions)] = np.where(positions + places < last, -2 - blocks, blocks)
        write_place[: len(positions)] = positions % places
        return PreviousTokenBatch(first, read, read_place, write, write_place)

    def one_by_one(self, arrays: Any, rows: slice | Int[np.ndarray, " rows"], seqs: Int[np.ndarray, " rows"]) -> Any:
        assert isinstance(rows, slice), "no head that drafts reads images"
        count = rows.stop - rows.start
        write, write_place = arrays.write[rows].copy(), arrays.write_place[rows]
        here = (arrays.first >= rows.start) & (arrays.first < rows.stop)
        taken = np.stack([arrays.first[here] - rows.start, arrays.read[here], arrays.read_place[here]])
        goes_on = rows.start > 0 and write[0] != _PADDING and 0 not in taken[0]
        if goes_on:  # the launch before left it in the pool
            before = arrays.write[rows.start - 1]
            own = [0, max(before, -2 - before), arrays.write_place[rows.start - 1]]
            taken = np.concatenate([np.array(own)[:, None], taken], axis=1)
        if write[-1] < _PADDING:
            write[-1] = -2 - write[-1]
        first, read, read_place = np.full((3, count), _PADDING, np.int32)
        first[:], read_place[:] = count, 0
        for array, found in zip((first, read, read_place), taken, strict=True):
            array[: len(found)] = found
        return PreviousTokenBatch(first, read, read_place, write, write_place)

    def operate(
        self,
        call: LayerCall,
        pool: Pool,
        index: int | Int[Array, ""],
        vectors: Float[Array, "tokens width"],
    ) -> tuple[Pool, Float[Array, "tokens width"]]:
        """Take the vectors of the tokens before, and keep these; see `jpaged.model_api.TakePreviousToken`."""
        place, width = self.place, vectors.shape[1]
        missing = place.shape[0] * self.format.shards - width
        kept = jnp.pad(vectors.astype(place.dtype), ((0, 0), (0, missing)))

        def on_shard(pool, arrays, kept):
            view = pool.reshape(call.views[0])
            held = _read(view, arrays, place)
            shifted = jnp.concatenate([jnp.zeros_like(kept[:1]), kept[:-1]])
            before = shifted.at[arrays.first].set(held, mode="drop")
            # What was read goes to no block, which XLA does not know: so it reads first, and needs no copy of the pool.
            nowhere = jnp.where(arrays.first < 0, arrays.read, _PADDING)
            write = jnp.concatenate([nowhere, arrays.write])
            places = jnp.concatenate([arrays.read_place, arrays.write_place])
            view = write_states(view, places, place, write, jnp.concatenate([held, kept]))
            # Gathered here: as columns of each shard they would cross devices again and again in what is joined to
            # them.
            return view.reshape(pool.shape), jax.lax.all_gather(before, TENSOR_AXIS, axis=1, tiled=True)

        shard, whole, columns = PartitionSpec(TENSOR_AXIS), PartitionSpec(), PartitionSpec(None, TENSOR_AXIS)
        sharded = over_tensor(on_shard, call.mesh, in_specs=(shard, whole, columns), out_specs=(shard, whole))
        pool, before = sharded(pool, PreviousTokenBatch(*map(jnp.asarray, call.arrays)), kept)
        return pool, before[:, :width].astype(vectors.dtype)


def _read(view: Array, arrays: PreviousTokenBatch, place: StatePlace) -> Array:
    """Return the vectors before the sequences' first tokens. A loop of one turn or none, as in `read_states`: XLA may
    repeat a read outside of a loop at its use, after the pool was written."""
    count = jnp.any(arrays.read >= 0).astype(jnp.int32)
    places, ids = jnp.asarray(arrays.read_place), jnp.asarray(arrays.read)
    none = jnp.zeros((len(ids), *place.shape), place.dtype)
    return jax.lax.fori_loop(0, count, lambda _, __: read_states(view, places, place, ids), none)
