"""Computes attention of each token over the kept tokens of its own sequence: full, in a sliding window, or in chunks.

Layers that share the KV of others (cross-layer attention) are of the same kinds: they bring no K and V, and only read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jpaged.execution.caches.base import HostStep, LayerCache, LayerCall, NextDecodes, Pool, Reads
from jpaged.execution.caches.images import image_reads
from jpaged.execution.mesh import HostOrDevice, over_tensor
from jpaged.memory.layout import GroupLayout, GroupSpec
from jpaged.memory.policies import ChunkedLocalAttention, FullAttention, Policy, SlidingWindow
from jpaged.model_api import TENSOR_AXIS, AttentionGroup
from pallas_kernels.kv_write import Runs, kv_write, plan_writes
from pallas_kernels.layout import view_shape
from pallas_kernels.paged_attention import Plan, fuses_writes, paged_attention, plan_attention, write_and_attend


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
    by_token: ClassVar[tuple[str, ...] | None] = ("slots", "last_keys")
    by_seq: ClassVar[tuple[str, ...]] = ("table",)
    follows: ClassVar[bool] = True

    def batch(self, step: HostStep, tables: Sequence[np.ndarray], layouts: Sequence[GroupLayout]) -> Any:
        (table,), (layout,) = tables, layouts
        return AttentionBatch(table, write_slots(step, table, layout, step.positions))

    def follow(self, arrays: Any, step: NextDecodes, layouts: Sequence[GroupLayout]) -> None:
        (layout,), places = layouts, step.positions
        arrays.slots[: len(places)] += 1
        moves = places % layout.spec.block_size == 0
        moves[step.changed] = True
        if moves.any():
            moved = np.flatnonzero(moves)
            arrays.slots[moved] = slots_at(arrays.table, moved, places[moved], layout)

    def one_by_one(self, arrays: Any, rows: slice | Int[np.ndarray, " rows"], seqs: Int[np.ndarray, " rows"]) -> Any:
        return super().one_by_one(arrays, rows, seqs)._replace(last_keys=None)  # a token alone sees none after it

    def last_seen(self, arrays: Any) -> Int[np.ndarray, " tokens"] | None:
        return arrays.last_keys


def write_slots(
    step: HostStep, table: np.ndarray, layout: GroupLayout, places: Int[np.ndarray, " tokens"]
) -> Int[np.ndarray, " padded_tokens"]:
    """Return the slots of the pool for the step's tokens; `places` are their places in their sequences' blocks.

    Raises:
        RuntimeError: a token has no block to be written to.
    """
    slots = np.full(step.padded_tokens, layout.num_blocks * layout.spec.block_size, np.int32)
    slots[: len(places)] = slots_at(table, step.seq_of_token, places, layout)
    return slots


def slots_at(
    table: np.ndarray, rows: Int[np.ndarray, " tokens"], places: Int[np.ndarray, " tokens"], layout: GroupLayout
) -> Int[np.ndarray, " tokens"]:
    """Return the slots for tokens at `places` of the sequences in some rows of a table.

    Raises:
        RuntimeError: a token has no block to be written to.
    """
    size = layout.spec.block_size
    blocks = table[rows, places // size]
    if blocks.size and blocks.min() < 0:
        raise RuntimeError(f"a token of group {layout.spec.name} has no block to be written to")
    return blocks * size + places % size


def last_keys(step: HostStep) -> Int[np.ndarray, " padded_tokens"] | None:
    """Return the position of the last token that each of the step's tokens sees: tokens of a whole image see all of
    it. None where the step has no place for images."""
    reads = image_reads(step)
    if reads is None:
        return None
    last = np.zeros(step.padded_tokens, np.int32)
    last[: len(step.positions)] = step.positions
    for read, rows in reads:
        if read.image.whole:
            last[rows] = read.image.stop - 1
    return last


def _ends_of_chunks(call: LayerCall, num_tokens: int) -> Int[Array, " tokens"]:
    """Return for each token of a step the position of its sequence's last one."""
    ends, lens = jnp.asarray(call.query_starts)[1:], jnp.asarray(call.kv_lens)
    seq = jnp.searchsorted(ends, jnp.arange(num_tokens), side="right")
    return lens[jnp.minimum(seq, len(lens) - 1)] - 1


class PreparedKernels(NamedTuple):
    """Results of attention kernels' plans, which depend on the batch alone; None if there is no plan or each layer
    makes its own.

    Attributes:
        writes: see `pallas_kernels.kv_write.plan_writes`.
        attention: see `pallas_kernels.paged_attention.plan_attention`.
    """

    writes: Runs | None = None
    attention: Plan | None = None


class Place(NamedTuple):
    """Says where a layer finds the tokens of each sequence.

    Attributes:
        layer: the layer's index in the view.
        table, slots: see `AttentionBatch`.
        kv_lens: tokens of each sequence that lie there.
        last_keys: see `AttentionBatch`.
        extra: what else `attend`'s `finish` needs.
        prepared: what the kernels need, if it is alike for all layers.
    """

    layer: Int[Array, ""]
    table: Int[HostOrDevice, "seqs pages"]
    slots: Int[HostOrDevice, " tokens"]
    kv_lens: Int[HostOrDevice, " seqs"]
    extra: Any = ()
    last_keys: Int[HostOrDevice, " tokens"] | None = None
    prepared: PreparedKernels = PreparedKernels()


class Mask(TypedDict, total=False):
    """Says which of the tokens before it a query sees: all of them where nothing is said."""

    sliding_window: int | None
    chunk_size: int | None


def prepared_for_slots(
    call: LayerCall, dtype: jnp.dtype, num_tokens: int, q_per_kv: int | None, mask: Mask
) -> PreparedKernels:
    """Return the kernels' plan of a step whose `AttentionBatch` serves all layers of the group.

    Args:
        dtype: dtype of the pool.
        num_tokens: rows of the batch.
        q_per_kv: query heads of a KV head; None = not known, and attention is planned by each layer.
    """
    arrays, shape = call.arrays, call.views[0]
    view = jax.ShapeDtypeStruct(shape, dtype)
    slots = jnp.asarray(arrays.slots)
    attention = None
    if q_per_kv is not None:
        attention = plan_attention(
            view,
            jnp.asarray(arrays.table),
            jnp.asarray(call.query_starts),
            jnp.asarray(call.kv_lens),
            tokens=num_tokens,
            q_per_kv=q_per_kv,
            last_keys=None if arrays.last_keys is None else jnp.asarray(arrays.last_keys),
            max_query_len=call.max_query_len,
            device_kind=call.mesh.devices.flat[0].device_kind,
            impl=call.impl,
            **mask,
        )
    return PreparedKernels(None if writes_within(call) else plan_writes(view, slots, impl=call.impl), attention)


def writes_within(call: LayerCall) -> bool:
    """Tell whether the launch that attends also writes: each token is its sequence's last one, and no other token
    reads its block."""
    return call.alone and call.max_query_len == 1 and fuses_writes(call.impl)


def attend(
    call: LayerCall,
    pool: Pool,
    place: Place,
    q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"] | None,
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    *,
    scale: float,
    soft_cap: float | None,
    sinks: Float[Array, "kv_heads q_per_kv"] | None,
    mask: Mask,
    finish: Callable[..., Array] | None = None,
) -> tuple[Pool, Float[Array, "tokens kv_heads q_per_kv head_dim"]]:
    """Write a layer's K and V and attend: each shard with its own heads over its own blocks.

    Args:
        finish: ``finish(view, place, q, out, query_starts, sinks) -> view`` changes a shard's view afterwards.
    """

    def on_shard(pool, place, q, kv, sinks, query_starts):
        view = pool.reshape(call.views[0])
        where = jnp.asarray(place.table), jnp.asarray(query_starts), jnp.asarray(place.kv_lens)
        how: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, **mask, "sinks": sinks}
        how |= {"plan": place.prepared.attention, "impl": call.impl}
        if kv and writes_within(call):
            new_k, new_v = kv
            view, out = write_and_attend(q, view, place.layer, new_k, new_v, *where, **how)
        else:
            if kv:
                new_k, new_v = kv
                writes = place.prepared.writes
                view = kv_write(view, place.layer, new_k, new_v, place.slots, plan=writes, impl=call.impl)
            how |= {"last_keys": place.last_keys, "max_query_len": call.max_query_len}
            out = paged_attention(q, view, place.layer, *where, **how)
        if finish is not None:
            view = finish(view, place, q, out, query_starts, sinks)
        return view.reshape(pool.shape), out

    heads, whole = PartitionSpec(None, TENSOR_AXIS), PartitionSpec()
    sharded = over_tensor(
        on_shard,
        call.mesh,
        in_specs=(PartitionSpec(TENSOR_AXIS), whole, heads, heads, PartitionSpec(TENSOR_AXIS), whole),
        out_specs=(PartitionSpec(TENSOR_AXIS), heads),
    )
    return sharded(pool, place, q, () if k is None else (k, v), sinks, call.query_starts)


@dataclass(frozen=True)
class AttentionCache(TokenSlots):
    """Serves layers that keep K and V of each token in its block."""

    group: AttentionGroup
    skips_unread_rows: ClassVar[bool] = True

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """Return the policy that says which blocks the layers still need."""

    @property
    def mask(self) -> Mask:
        """Return which tokens the layers' queries see, as arguments of the kernels."""
        return {}

    @property
    def layer_shape(self) -> tuple[int, ...]:
        group, form = self.group, self.format
        heads = group.kv_heads // form.shards
        return view_shape(1, 1, heads, group.head_dim, form.block_size, form.dtype, form.tile)[2:]

    def batch(self, step: HostStep, tables: Sequence[np.ndarray], layouts: Sequence[GroupLayout]) -> Any:
        arrays = super().batch(step, tables, layouts)
        return arrays._replace(last_keys=last_keys(step)) if self.group.sees_images else arrays

    def pool_groups(self) -> tuple[GroupSpec, ...]:
        return (self.spec(self.group.name, len(self.group.layers), self.policy),)

    def reads(self) -> Reads:
        group = self.group
        token_bytes = sum(spec.real_bytes / spec.block_size for spec in self.pool_groups())
        mask = self.mask
        return Reads(
            token_bytes * (1 + group.readers / len(group.layers)),
            mask.get("sliding_window") or mask.get("chunk_size"),
            (len(group.layers) + group.readers) * group.head_dim,
        )

    def prepare(self, call: LayerCall, num_tokens: int) -> PreparedKernels:
        return prepared_for_slots(call, self.format.dtype, num_tokens, self.group.q_per_kv, self.mask)

    def operate(
        self,
        call: LayerCall,
        pool: Pool,
        index: int | Int[Array, ""],
        q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"] | None,
        v: Float[Array, "tokens kv_heads head_dim"] | None,
        *,
        scale: float,
        soft_cap: float | None = None,
        sinks: Float[Array, "kv_heads q_per_kv"] | None = None,
        last_keys: Int[Array, " tokens"] | None = None,
        seen: Int[Array, " tokens"] | None = None,
        sees_ahead: bool = False,
    ) -> tuple[Pool, Float[Array, "tokens kv_heads q_per_kv head_dim"]]:
        table, slots, seen_last = call.arrays
        if seen is not None:
            assert k is None and last_keys is None, "what lies before a token is only read"
            lens = jnp.where(call.kv_lens > 0, seen[jnp.minimum(call.query_starts[:-1], len(seen) - 1)], 0)
            # To the kernels the last token that is seen is the query's own; its window reaches one token further back.
            mask: Mask = {**self.mask}
            if (window := mask.get("sliding_window")) is not None:
                mask["sliding_window"] = window - 1
            place = Place(jnp.asarray(index, jnp.int32), table, slots, lens)
            return attend(call, pool, place, q, k, v, scale=scale, soft_cap=soft_cap, sinks=sinks, mask=mask)
        prepared = call.prepared or PreparedKernels()
        if sees_ahead:
            assert last_keys is None, "of a head that drafts all rows are read"
            seen_last = _ends_of_chunks(call, len(q))
            # Attention was planned for queries that see no token after them.
            prepared = PreparedKernels(prepared.writes)
        elif last_keys is not None:
            seen_last = last_keys if seen_last is None else jnp.where(last_keys < 0, -1, seen_last)
        place = Place(jnp.asarray(index, jnp.int32), table, slots, call.kv_lens, last_keys=seen_last, prepared=prepared)
        return attend(call, pool, place, q, k, v, scale=scale, soft_cap=soft_cap, sinks=sinks, mask=self.mask)


class FullAttentionCache(AttentionCache):
    """Serves layers whose queries see all tokens before them."""

    @property
    def policy(self) -> Policy:
        return FullAttention()


class SlidingWindowCache(AttentionCache):
    """Serves layers whose queries see the last tokens, their own included; blocks before the window are released."""

    @property
    def policy(self) -> Policy:
        assert self.group.sliding_window is not None
        return SlidingWindow(self.group.sliding_window)

    @property
    def mask(self) -> Mask:
        return {"sliding_window": self.group.sliding_window}


class ChunkedAttentionCache(AttentionCache):
    """Serves layers whose queries see the tokens of their own chunk; blocks of the chunks before are given up."""

    @property
    def policy(self) -> Policy:
        assert self.group.chunk_size is not None
        return ChunkedLocalAttention(self.group.chunk_size)

    @property
    def mask(self) -> Mask:
        return {"chunk_size": self.group.chunk_size}
