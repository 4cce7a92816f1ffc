"""The engine's side of `jpaged.model_api.Attend`: each shard attends with its own heads over its own blocks."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from jpaged.execution.arrays import HostOrDevice
from jpaged.execution.batch import StepBatch
from jpaged.execution.kept_select import Selection, select_kept
from jpaged.execution.pool import PoolSpec
from jpaged.execution.replicas import over_tensor
from jpaged.model_api import TENSOR_AXIS, LayerRef
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.platform import Impl

Pool = Shaped[Array, "shards pages rows 128"]


class Place(NamedTuple):
    """Where a layer finds the tokens of each sequence.

    Attributes:
        layer: its index in its group's view.
        table, slots, kv_lens: as `StepBatch` has them, for that group.
        selection: None where layers keep whole prompts.
    """

    layer: Int[Array, ""]
    table: Int[HostOrDevice, "seqs pages"]
    slots: Int[HostOrDevice, " tokens"]
    kv_lens: Int[HostOrDevice, " seqs"]
    selection: Selection | None = None


def attend(
    spec: PoolSpec,
    mesh: Mesh,
    batch: StepBatch,
    pool: Pool,
    layer: LayerRef,
    q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"] | None,
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, "kv_heads q_per_kv"] | None = None,
    max_query_len: int | None,
    impl: Impl | None,
) -> tuple[Pool, Float[Array, "tokens kv_heads q_per_kv head_dim"]]:
    """Write a layer's K and V, attend, and where prompts end move what the layer keeps of them to their first slots."""
    group, place = _place(spec, batch, layer)

    def on_shard(pool, place, q, kv, sinks, query_starts):
        view = pool.reshape(spec.views[group])
        if kv:
            new_k, new_v = kv
            view = kv_write(view, place.layer, new_k, new_v, place.slots, impl=impl)
        out = paged_attention(
            q,
            view,
            place.layer,
            place.table,
            query_starts,
            place.kv_lens,
            scale=scale,
            soft_cap=soft_cap,
            sliding_window=spec.groups[group].sliding_window,
            chunk_size=spec.groups[group].chunk_size,
            sinks=sinks,
            max_query_len=max_query_len,
            impl=impl,
        )
        if place.selection is not None and max_query_len != 1:
            where = place.table, query_starts, place.kv_lens
            options = {"scale": scale, "soft_cap": soft_cap, "sinks": sinks, "impl": impl}
            view = select_kept(spec, place.selection, view, place.layer, q, out, *where, **options)
        return view.reshape(pool.shape), out

    heads, whole = PartitionSpec(None, TENSOR_AXIS), PartitionSpec()
    sharded = over_tensor(
        on_shard,
        mesh,
        in_specs=(PartitionSpec(TENSOR_AXIS), whole, heads, heads, PartitionSpec(TENSOR_AXIS), whole),
        out_specs=(PartitionSpec(TENSOR_AXIS), heads),
    )
    return sharded(pool, place, q, () if k is None else (k, v), sinks, batch.query_starts)


def _place(spec: PoolSpec, batch: StepBatch, layer: LayerRef) -> tuple[int, Place]:
    """A group whose view the layer's is, and where its tokens lie.

    Bands of layers have views of one shape, so that a layer's number may be traced: it picks among their tables.
    """
    number = jnp.asarray(layer.index, jnp.int32)
    if batch.kept is None:
        group = spec.group_index[layer.group]
        return group, Place(number, batch.tables[group], batch.slots[group], batch.kv_lens)
    band, index = jnp.divmod(number, len(spec.groups[0].layers))
    budgets = jnp.asarray([group.prompt_budget for group in spec.groups], jnp.int32)
    kept = batch.kept
    return 0, Place(
        index,
        jnp.stack(batch.tables)[band],
        jnp.stack(batch.slots)[band],
        batch.kv_lens - jnp.asarray(kept.dropped)[band],
        Selection(kept.ending, budgets[band]),
    )
