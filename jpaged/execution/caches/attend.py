"""Writes a layer's K and V to the pool and attends to what lies there, each shard for itself, by the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jpaged.execution.arrays import HostOrDevice
from jpaged.execution.caches.base import LayerCall, Pool
from jpaged.execution.replicas import over_tensor
from jpaged.model_api import TENSOR_AXIS
from pallas_kernels.kv_write import Runs, kv_write, plan_writes
from pallas_kernels.paged_attention import Plan, paged_attention, plan_attention


class AttentionPlan(NamedTuple):
    """Holds what attention kernels compute from the batch alone; None where they compute nothing, or where each layer
    does it for itself.

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
        table, slots: see `token_slots.AttentionBatch`.
        kv_lens: tokens of each sequence that lie there.
        last_keys: see `token_slots.AttentionBatch`.
        extra: what else `attend`'s `finish` needs.
        plan: what the kernels need, if it is alike for all layers.
    """

    layer: Int[Array, ""]
    table: Int[HostOrDevice, "seqs pages"]
    slots: Int[HostOrDevice, " tokens"]
    kv_lens: Int[HostOrDevice, " seqs"]
    extra: Any = ()
    last_keys: Int[HostOrDevice, " tokens"] | None = None
    plan: AttentionPlan = AttentionPlan()


class Mask(TypedDict, total=False):
    """Says which of the tokens before it a query sees: all of them where nothing is said."""

    sliding_window: int | None
    chunk_size: int | None


def plan_of_slots(
    call: LayerCall, dtype: jnp.dtype, num_tokens: int, q_per_kv: int | None, mask: Mask
) -> AttentionPlan:
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
    return AttentionPlan(plan_writes(view, slots, impl=call.impl), attention)


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
        if kv:
            new_k, new_v = kv
            view = kv_write(view, place.layer, new_k, new_v, place.slots, plan=place.plan.writes, impl=call.impl)
        out = paged_attention(
            q,
            view,
            place.layer,
            place.table,
            query_starts,
            place.kv_lens,
            scale=scale,
            soft_cap=soft_cap,
            **mask,
            sinks=sinks,
            last_keys=place.last_keys,
            max_query_len=call.max_query_len,
            plan=place.plan.attention,
            impl=call.impl,
        )
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
