"""The engine's side of `jpaged.model_api.Attend`: each shard attends with its own heads over its own blocks."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from jpaged.execution.batch import StepBatch
from jpaged.execution.pool import PoolSpec
from jpaged.execution.replicas import over_tensor
from jpaged.model_api import TENSOR_AXIS, LayerRef
from pallas_kernels.kv_select import Keep, kv_select
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.platform import Impl

Pool = Shaped[Array, "shards pages rows 128"]


class Selection(NamedTuple):
    """Sequences that drop tokens of their prompts in this layer.

    Attributes:
        ending: see `KeptBatch`.
        budget: tokens that are kept.
    """

    ending: Int[Array, " seqs"]
    budget: Int[Array, ""]


class Place(NamedTuple):
    """Where a layer finds the tokens of each sequence.

    Attributes:
        index: of the layer in its group's view.
        table, slots, kv_lens: as `StepBatch` has them, for that group.
        selection: None where layers keep whole prompts.
    """

    index: Int[Array, ""]
    table: Int[Array, "seqs pages"]
    slots: Int[Array, " tokens"]
    kv_lens: Int[Array, " seqs"]
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
    """Write a layer's K and V, attend, and where prompts end keep what the layer keeps of them."""
    group, place = _place(spec, batch, layer)
    kv_budget = spec.kv_budget

    def select(view: Array, place: Place, q: Array, query_starts: Array, sinks: Array | None) -> Array:
        """Each prompt that ends, one after the other, as there are few."""
        assert kv_budget is not None and place.selection is not None
        ending, budget = place.selection
        keep = Keep(kv_budget.sinks, kv_budget.recent, kv_budget.pool)
        most = max(band.prompt_budget or 0 for band in spec.groups)

        def one(i: Array, view: Array) -> Array:
            seq = ending[i]
            last = lax.dynamic_slice_in_dim(q, query_starts[seq + 1] - kv_budget.window, kv_budget.window)
            length, options = place.kv_lens[seq], {"scale": scale, "soft_cap": soft_cap, "sinks": sinks, "impl": impl}
            return kv_select(view, place.index, last, place.table[seq], length, budget, keep=keep, most=most, **options)

        return lax.fori_loop(0, (ending >= 0).sum(), one, view)

    def on_shard(pool, place, q, kv, sinks, query_starts):
        view = pool.reshape(spec.views[group])
        if kv:
            new_k, new_v = kv
            view = kv_write(view, place.index, new_k, new_v, place.slots, impl=impl)
        out = paged_attention(
            q,
            view,
            place.index,
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
        # No prompt that is long enough ends in a step of fewer tokens than score.
        if kv_budget is not None and max_query_len != 1 and len(q) >= kv_budget.window:
            view = select(view, place, q, query_starts, sinks)
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
    """A group with the layer's view, and where its tokens lie.

    Bands of layers have views of one shape, so that a layer's number may be traced: it picks among their tables.
    """
    if batch.kept is None:
        group = spec.group_index[layer.group]
        index = jnp.asarray(layer.index, jnp.int32)
        return group, Place(index, batch.tables[group], batch.slots[group], batch.kv_lens)
    band, index = jnp.divmod(jnp.asarray(layer.index, jnp.int32), len(spec.groups[0].layers))
    budgets = jnp.asarray([group.prompt_budget for group in spec.groups], jnp.int32)
    return 0, Place(
        index,
        jnp.stack(batch.tables)[band],
        jnp.stack(batch.slots)[band],
        batch.kv_lens - batch.kept.dropped[band],
        Selection(batch.kept.ending, budgets[band]),
    )
