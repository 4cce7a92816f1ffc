"""Keeps K and V of images for layers whose tokens attend to them (cross-attention, Llama 3.2 Vision).

The encoder's program writes them, one image at a time, for all layers; a step only reads. Which image lies in which
blocks the host says (`jpaged.memory.shared_blocks`), and which of it each token sees.
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

from jpaged.execution.caches.base import HostStep, LayerCall, Pool, Reads
from jpaged.execution.caches.images import EncodedCache, blocks_of_image, image_reads
from jpaged.execution.mesh import HostOrDevice, over_tensor
from jpaged.memory.layout import GroupLayout, GroupSpec
from jpaged.memory.policies import ImageFeatures
from jpaged.model_api import TENSOR_AXIS, CrossAttentionGroup
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layout import view_shape
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.platform import Impl, resolve_impl

_TABLE_IDS = 1 << 17
"""Most block ids of a launch on TPUs, where tables lie in scalar memory."""


class CrossAttentionBatch(NamedTuple):
    """Holds a step's arrays for layers that attend to images; None where no token of the step sees one.

    Attributes:
        table: blocks of the image that each sequence's tokens see; -1 after them.
        seen: how many of its features each token sees, the first ones; 0 = none.
    """

    table: Int[HostOrDevice, "seqs pages"] | None = None
    seen: Int[HostOrDevice, " tokens"] | None = None


@dataclass(frozen=True)
class CrossAttentionCache(EncodedCache):
    """Serves layers that attend to images."""

    group: CrossAttentionGroup
    Batch: ClassVar[type[tuple[Any, ...]]] = CrossAttentionBatch
    by_token: ClassVar[tuple[str, ...] | None] = ("seen",)
    by_seq: ClassVar[tuple[str, ...]] = ("table",)

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

    def batch(self, step: HostStep, tables: Sequence[np.ndarray], layouts: Sequence[GroupLayout]) -> Any:
        reads = image_reads(step)
        if reads is None:
            return CrossAttentionBatch()
        (layout,) = layouts
        table = np.full((step.padded_seqs, self.pages), -1, np.int32)
        seen = np.zeros(step.padded_tokens, np.int32)
        for read, rows in reads:
            blocks = blocks_of_image(read.blocks, layout)
            table[step.seq_of_token[rows.start], : len(blocks)] = blocks
            seen[rows] = read.image.seen(np.arange(read.start, read.stop))
        return CrossAttentionBatch(table, seen)

    def operate(
        self,
        call: LayerCall,
        pool: Pool,
        index: int | Int[Array, ""],
        q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
        *,
        scale: float,
    ) -> tuple[Pool, tuple[Float[Array, "tokens kv_heads q_per_kv head_dim"], Bool[Array, " tokens"]] | None]:
        """Attend to the images that the tokens see; see `jpaged.model_api.AttendToImages`."""
        if call.arrays.table is None:
            return pool, None
        arrays = (*map(jnp.asarray, (index, call.arrays.table, call.arrays.seen, call.query_starts)),)

        def on_shard(pool, q, index, table, seen, starts):
            reading = _Reading(pool.reshape(call.views[0]), index, table, seen, starts, scale, call)
            chosen = resolve_impl(call.impl)
            if call.max_query_len != 1 and chosen in ("reference", "xla", "cpu"):
                return reading.by_sequence(q)
            most = _TABLE_IDS // table.shape[1] if chosen in ("tpu", "tpu_interpret") else len(q)
            return reading.by_token(q, max(1, min(most, len(q))))

        heads, whole = PartitionSpec(None, TENSOR_AXIS), PartitionSpec()
        specs = (PartitionSpec(TENSOR_AXIS), heads, *(whole for _ in arrays))
        out = over_tensor(on_shard, call.mesh, in_specs=specs, out_specs=heads)(pool, q, *arrays)
        sees = arrays[2] > 0
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
            blocks = pool.reshape(view)
            for layer in range(len(k)):  # XLA:CPU copies the pool to begin a loop with it
                blocks = kv_write(blocks, layer, k[layer], v[layer], slots, impl=impl)
            return blocks.reshape(pool.shape)

        shard, heads = PartitionSpec(TENSOR_AXIS), PartitionSpec(None, None, TENSOR_AXIS)
        sharded = over_tensor(on_shard, mesh, in_specs=(shard, heads, heads, PartitionSpec()), out_specs=shard)
        return sharded(pool, k, v, slots)


class _Reading(NamedTuple):
    """The arguments of one layer's attention to images on one shard. A token that sees no image gets a value without
    meaning."""

    view: Float[Array, "blocks layers kv_heads tiles block_size 128"]
    layer: Int[Array, ""]
    table: Int[Array, "seqs pages"]
    seen: Int[Array, " tokens"]
    starts: Int[Array, " seqs+1"]
    scale: float
    call: LayerCall

    def by_sequence(self, q: Float[Array, "tokens ..."]) -> Float[Array, "tokens ..."]:
        """Attend from all tokens of a sequence in one call; the kernels let a token see later places."""
        lens = self.seen[jnp.clip(self.starts[1:] - 1, 0, len(q) - 1)]
        return self._attend(q, self.table, self.starts, lens, last_keys=self.seen - 1)

    def by_token(self, q: Float[Array, "tokens ..."], most: int) -> Float[Array, "tokens ..."]:
        """Attend from each token as a separate sequence, whose last token it is; from `most` of them at a time, as
        far as there are tokens."""
        token = jnp.arange(len(q))
        sequence = jnp.minimum((token[:, None] >= self.starts[1:]).sum(axis=1), len(self.table) - 1)
        lens = jnp.maximum(self.seen, 1)  # one that sees none reads one place, for nothing
        starts = jnp.arange(most + 1, dtype=jnp.int32)
        if most == len(q):
            return self._attend(q, self.table[sequence], starts, lens)
        missing = -len(q) % most
        padded = jnp.pad(q, ((0, missing), *((0, 0),) * (q.ndim - 1)))
        sequence, lens = jnp.pad(sequence, (0, missing)), jnp.pad(lens, (0, missing), constant_values=1)

        def some(number: Array, out: Array) -> Array:
            first = number * most
            own_q, own_sequence, own_lens = (
                jax.lax.dynamic_slice_in_dim(array, first, most) for array in (padded, sequence, lens)
            )
            found = self._attend(own_q, self.table[own_sequence], starts, own_lens)
            return jax.lax.dynamic_update_slice_in_dim(out, found, first, 0)

        slices = (self.starts[-1] + most - 1) // most
        return jax.lax.fori_loop(0, slices, some, jnp.zeros_like(padded))[: len(q)]

    def _attend(self, q: Array, table: Array, starts: Array, lens: Array, last_keys: Array | None = None) -> Array:
        return paged_attention(
            q,
            self.view,
            self.layer,
            table,
            starts,
            lens,
            scale=self.scale,
            last_keys=last_keys,
            max_query_len=1 if last_keys is None else None,
            impl=self.call.impl,
        )
