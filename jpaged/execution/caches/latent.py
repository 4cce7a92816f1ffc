"""Keeps the latents of multi-head latent attention: one row a token for all heads, whole on every tensor shard."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jpaged.execution.caches.attention import Place, PreparedKernels, TokenSlots, prepared_for_slots, writes_within
from jpaged.execution.caches.base import LayerCall, Pool, Reads
from jpaged.execution.mesh import over_tensor
from jpaged.memory.layout import GroupSpec
from jpaged.memory.policies import FullAttention
from jpaged.model_api import TENSOR_AXIS, LatentGroup
from pallas_kernels.latent_attention import latent_attention, latent_write, write_and_attend_to_latents
from pallas_kernels.layout import latent_view_shape


@dataclass(frozen=True)
class LatentCache(TokenSlots):
    """Serves layers that keep each token's latent and rotated key in its block, and no K and V."""

    group: LatentGroup

    @property
    def layer_shape(self) -> tuple[int, ...]:
        form = self.format
        return latent_view_shape(1, 1, self.group.width, form.block_size, form.dtype, form.tile)[2:]

    def pool_groups(self) -> tuple[GroupSpec, ...]:
        return (self.spec(self.group.name, len(self.group.layers), FullAttention()),)

    def reads(self) -> Reads:
        (spec,) = self.pool_groups()
        # A query is multiplied with all of a row for its score, and with the latent for its value.
        lanes = (self.group.width + self.group.rank) / 2
        return Reads(spec.real_bytes / spec.block_size, None, round(len(self.group.layers) * lanes))

    def prepare(self, call: LayerCall, num_tokens: int) -> PreparedKernels:
        heads = self.group.heads
        own = None if heads is None else heads // self.format.shards
        return prepared_for_slots(call, self.format.dtype, num_tokens, own, {})

    def operate(
        self,
        call: LayerCall,
        pool: Pool,
        index: int | Int[Array, ""],
        q: Float[Array, "tokens heads width"],
        rows: Float[Array, "tokens width"],
        *,
        scale: float,
    ) -> tuple[Pool, Float[Array, "tokens heads rank"]]:
        """Write a layer's rows and attend, each shard with its own heads; see `jpaged.model_api.AttendToLatents`."""

        def on_shard(pool, place, q, rows, query_starts):
            view, where = pool.reshape(call.views[0]), (place.table, query_starts, place.kv_lens)
            if writes_within(call):
                plan, rank = place.prepared.attention, self.group.rank
                view, out = write_and_attend_to_latents(
                    q, view, place.layer, rows, *where, rank=rank, scale=scale, plan=plan, impl=call.impl
                )
                return view.reshape(pool.shape), out
            view = latent_write(view, place.layer, rows, place.slots, plan=place.prepared.writes, impl=call.impl)
            out = latent_attention(
                q,
                view,
                place.layer,
                *where,
                rank=self.group.rank,
                scale=scale,
                max_query_len=call.max_query_len,
                plan=place.prepared.attention,
                impl=call.impl,
            )
            return view.reshape(pool.shape), out

        whole, shard, heads = PartitionSpec(), PartitionSpec(TENSOR_AXIS), PartitionSpec(None, TENSOR_AXIS)
        sharded = over_tensor(
            on_shard, call.mesh, in_specs=(shard, whole, heads, whole, whole), out_specs=(shard, heads)
        )
        prepared, (table, slots, _) = call.prepared or PreparedKernels(), call.arrays
        place = Place(jnp.asarray(index, jnp.int32), table, slots, call.kv_lens, prepared=prepared)
        return sharded(pool, place, q, rows, call.query_starts)
