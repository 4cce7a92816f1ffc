"""Keeps K and V of images for layers whose tokens attend to them (cross-attention, Llama 3.2 Vision).

The encoder's program writes them, one image at a time, for all layers; a step only reads. Which image lies in which
blocks the host says (`jpaged.memory.images`), and which of it each token sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jpaged.execution.arrays import HostOrDevice
from jpaged.execution.caches.base import HostStep, LayerCall, Pool, Reads
from jpaged.execution.caches.images import EncodedCache, blocks_of_image
from jpaged.execution.replicas import over_tensor
from jpaged.memory.layout import GroupLayout, GroupSpec
from jpaged.memory.policies import ImageFeatures
from jpaged.model_api import TENSOR_AXIS, CrossAttentionGroup
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layout import view_shape
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.platform import Impl, resolve_impl


class CrossAttentionBatch(NamedTuple):
    """Holds a step's arrays for layers that attend to images; None where no token of the step sees one.

    Attributes:
        table: blocks of the image that each sequence's tokens see; -1 behind them.
        seen: how many of its features each token sees, the first ones; 0 = none.
    """

    table: Int[HostOrDevice, "seqs pages"] | None = None
    seen: Int[HostOrDevice, " tokens"] | None = None


@dataclass(frozen=True)
class CrossAttentionCache(EncodedCache):
    """Serves layers that attend to images."""

    group: CrossAttentionGroup
    Batch: ClassVar[type[tuple[Any, ...]]] = CrossAttentionBatch

    @property
    def layer_shape(self) -> tuple[int, ...]:
        group, form = self.group, self.format
        heads = group.kv_heads // form.shards
        return view_shape(1, 1, heads, group.head_dim, form.block_size, form.dtype, form.tile)[2:]

    @property
    def pages(self) -> int:
        """Return how many blocks the tokens of a sequence see at most."""
        return -(-self.group.image_tokens * self.group.most_together // self.format.block_size)

    def pool_groups(self) -> tuple[GroupSpec, ...]:
        policy = ImageFeatures(self.group.image_tokens, stays=True)
        return (self.spec(self.group.name, len(self.group.layers), policy),)

    def reads(self) -> Reads:
        (spec,) = self.pool_groups()
        layers = len(self.group.layers)
        return Reads(spec.real_bytes / spec.block_size, self.group.image_tokens, layers * self.group.head_dim)

    def table_width(self, spec: GroupSpec, max_model_len: int) -> int:
        return 0  # images' blocks are in no sequence's table

    def batch(self, step: HostStep, tables: Sequence[np.ndarray], plans: Sequence[GroupLayout]) -> Any:
        if step.images is None:
            return CrossAttentionBatch()
        (plan,) = plans
        table = np.full((step.padded_seqs, self.pages), -1, np.int32)
        seen = np.zeros(step.padded_tokens, np.int32)
        for image in step.images:
            blocks = blocks_of_image(image.read.blocks, plan)
            table[step.seq_of_token[image.row], : len(blocks)] = blocks
            seen[image.rows] = image.read.image.seen(np.arange(image.read.start, image.read.stop))
        return CrossAttentionBatch(table, seen)

    def one_by_one(self, arrays: Any, rows: slice, seqs: Int[np.ndarray, " rows"]) -> Any:
        if arrays.table is None:
            return arrays
        return CrossAttentionBatch(arrays.table[seqs], arrays.seen[rows])

    def operate(
        self,
        call: LayerCall,
        pool: Pool,
        index: int | Int[Array, ""],
        q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
        *,
        scale: float,
    ) -> tuple[Pool, tuple[Float[Array, "tokens kv_heads q_per_kv head_dim"], Bool[Array, " tokens"]] | None]:
        """Attend to the images that the tokens see; see `jpaged.model_api.AttendToImages`.

        Kernels that let no token see more than its own place in a sequence get each token as a sequence of its own.
        """
        if call.arrays.table is None:
            return pool, None
        table, seen = jnp.asarray(call.arrays.table), jnp.asarray(call.arrays.seen)
        starts, token = jnp.asarray(call.query_starts), jnp.arange(len(q), dtype=jnp.int32)
        longest = call.max_query_len
        if longest == 1 or resolve_impl(call.impl) in ("reference", "xla", "cpu"):
            last, lens = seen - 1, seen[jnp.clip(starts[1:] - 1, 0, len(q) - 1)]
        else:
            of_token = jnp.minimum((token[:, None] >= starts[1:]).sum(axis=1), len(table) - 1)
            table, starts, longest = table[of_token], jnp.arange(len(q) + 1, dtype=jnp.int32), 1
            last, lens = None, seen
        if longest == 1:
            last, lens = None, jnp.maximum(lens, 1)  # a token that sees none reads one place, for nothing

        def on_shard(pool, layer, q, table, starts, lens, last):
            view = pool.reshape(call.views[0])
            return paged_attention(
                q,
                view,
                layer,
                table,
                starts,
                lens,
                scale=scale,
                last_keys=last,
                max_query_len=longest,
                impl=call.impl,
            )

        heads, whole = PartitionSpec(None, TENSOR_AXIS), PartitionSpec()
        specs = (PartitionSpec(TENSOR_AXIS), whole, heads, whole, whole, whole, whole)
        sharded = over_tensor(on_shard, call.mesh, in_specs=specs, out_specs=heads)
        out = sharded(pool, jnp.asarray(index, jnp.int32), q, table, starts, lens, last)
        sees = seen > 0
        return pool, (jnp.where(sees[:, None, None, None], out, 0), sees)

    def launch_rows(self, features: int) -> int:
        return self.group.image_tokens

    def write(
        self,
        mesh: Mesh,
        view: tuple[int, ...],
        pool: Pool,
        encoded: tuple[Float[Array, "layers features kv_heads head_dim"], Array],
        rows: Int[HostOrDevice, " rows"],
        impl: Impl | None = None,
    ) -> Pool:
        k, v = (part[:, : len(rows)] for part in encoded)
        slots = jnp.minimum(jnp.asarray(rows)[: k.shape[1]], view[0] * self.format.block_size)

        def on_shard(pool, k, v, slots):
            def write_layer(layer: Array, blocks: Array) -> Array:
                return kv_write(blocks, layer, k[layer], v[layer], slots, impl=impl)

            return jax.lax.fori_loop(0, len(k), write_layer, pool.reshape(view)).reshape(pool.shape)

        shard, heads = PartitionSpec(TENSOR_AXIS), PartitionSpec(None, None, TENSOR_AXIS)
        sharded = over_tensor(on_shard, mesh, in_specs=(shard, heads, heads, PartitionSpec()), out_specs=shard)
        return sharded(pool, k, v, slots)
