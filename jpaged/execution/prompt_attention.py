"""Computes attention within whole prompts, in both directions, for models that keep no KV.

The kernels of paged attention do it on memory of the step's own: K and V of each prompt are written to consecutive
blocks, and every query is given the last key that it sees. So the work grows with the sum of the prompts' squares, as
for a decoder's prompts, and no mask of all tokens by all tokens is made.

These kernels add no biases. Where a family has them (MPNet), XLA goes over tiles of queries, and for each over the
tiles of keys from its first prompt's start to its last one's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jpaged.execution.mesh import HostOrDevice, over_tensor, platform
from jpaged.model_api import TENSOR_AXIS, SegmentKind
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layout import view_shape
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.platform import Impl

TILE = 64
"""Queries, and keys, that `biased_attention` takes at once."""
BLOCK_SIZES = {"tpu": 128}
"""Tokens a block by platform; elsewhere 16."""


class PromptBlocks(NamedTuple):
    """Says where a step's prompts lie in blocks that only this step uses.

    Attributes:
        table: the blocks of each prompt, -1 where there are no more.
        slots: where each token's K and V go; those of padding are out of range.
        query_starts, lengths: first row and number of tokens of each prompt.
        ends: number of tokens of the prompt that each token is in.
        places: each token's place in its prompt.
    """

    table: Int[Array, "seqs pages"]
    slots: Int[Array, " tokens"]
    query_starts: Int[Array, " seqs+1"]
    lengths: Int[Array, " seqs"]
    ends: Int[Array, " tokens"]
    places: Int[Array, " tokens"]


def num_blocks(tokens: int, prompts: int, block_size: int) -> int:
    """Return how many blocks hold any prompts of so many tokens together."""
    return tokens // block_size + prompts


def prompt_blocks(
    starts: Int[Array, " seqs+1"], tokens: int, block_size: int, longest: int | None = None
) -> PromptBlocks:
    """Lay prompts into blocks, each from the start of a block on.

    Args:
        starts: first row of each prompt, and where the last one ends.
        tokens: rows, those of padding included.
        longest: most tokens of a prompt; None = all rows.
    """
    lengths = starts[1:] - starts[:-1]
    counts = -(-lengths // block_size)
    first = jnp.cumsum(counts) - counts
    page = jnp.arange(-(-min(tokens, longest or tokens) // block_size), dtype=jnp.int32)
    table = jnp.where(page < counts[:, None], first[:, None] + page, -1).astype(jnp.int32)
    token = jnp.arange(tokens, dtype=jnp.int32)
    seq = _prompt_of(token, starts)
    places = token - starts[seq]
    outside = num_blocks(tokens, len(lengths), block_size) * block_size
    slots = jnp.where(token < starts[-1], first[seq] * block_size + places, outside)
    return PromptBlocks(table, slots.astype(jnp.int32), starts, lengths, lengths[seq], places)


def _prompt_of(rows: Int[Array, " rows"], starts: Int[Array, " seqs+1"]) -> Int[Array, " rows"]:
    """Return the number of the prompt that each row is in; of padding, that of the last one."""
    return jnp.minimum((rows[:, None] >= starts[1:]).sum(axis=1, dtype=jnp.int32), len(starts) - 2)


def biased_attention(
    q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    bias: Float[Array, "kv_heads q_per_kv distances"],
    at: PromptBlocks,
    *,
    scale: float,
    reach: int | None = None,
) -> Float[Array, "tokens kv_heads q_per_kv head_dim"]:
    """Attend in float32 within prompts, with biases by distance; see `jpaged.model_api.AttendWithinPrompts`."""
    tokens, starts = len(q), at.query_starts
    padding = [(0, -tokens % TILE)]
    q, k, v = (jnp.pad(x.astype(jnp.float32), padding + [(0, 0)] * (x.ndim - 1)) for x in (q, k, v))
    rows = jnp.arange(len(q), dtype=jnp.int32)
    seq = _prompt_of(rows, starts)
    middle, heads, width = bias.shape[-1] // 2, q.shape[1:3], v.shape[-1]

    def tile_of(x: Array, tile: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, tile * TILE, TILE)

    def queries(tile: Array) -> Float[Array, "tile kv_heads q_per_kv head_dim"]:
        mine, own_rows, own_seq = (tile_of(x, tile) for x in (q, rows, seq))
        first, stop = starts[own_seq[0]], starts[own_seq[-1] + 1]

        def keys(other: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, mixed = carry
            keys, values, key_rows, key_seq = (tile_of(x, other) for x in (k, v, rows, seq))
            distance = key_rows - own_rows[:, None]
            scores = scale * jnp.einsum("tkqd,skd->kqts", mine, keys, precision="highest")
            scores += bias.astype(jnp.float32)[:, :, jnp.clip(distance, -middle, middle) + middle]
            seen = (own_seq[:, None] == key_seq) & (key_rows < starts[-1])
            if reach is not None:
                seen &= jnp.abs(distance) <= reach
            scores = jnp.where(seen, scores, -jnp.inf)
            higher = jnp.maximum(top, scores.max(axis=-1))
            base = jnp.where(jnp.isfinite(higher), higher, 0)
            shares, kept = jnp.exp(scores - base[..., None]), jnp.exp(top - base)
            total = total * kept + shares.sum(axis=-1)
            mixed = mixed * kept[..., None] + jnp.einsum("kqts,skd->kqtd", shares, values, precision="highest")
            return higher, total, mixed

        empty = jnp.full((*heads, TILE), -jnp.inf), jnp.zeros((*heads, TILE)), jnp.zeros((*heads, TILE, width))
        _, total, mixed = lax.fori_loop(first // TILE, -(-stop // TILE), keys, empty)
        return jnp.moveaxis(mixed / jnp.where(total > 0, total, 1)[..., None], 2, 0)

    out = lax.map(queries, jnp.arange(len(q) // TILE, dtype=jnp.int32))
    return out.reshape(len(q), *heads, width)[:tokens]


class PromptAttention:
    """Attends within prompts; see `jpaged.model_api.AttendWithinPrompts`. Used while tracing.

    Args:
        starts, tokens, longest: see `prompt_blocks`.
        max_query_len, impl: see `paged_attention`.
    """

    def __init__(
        self,
        mesh: Mesh,
        starts: Int[HostOrDevice, " seqs+1"],
        tokens: int,
        *,
        longest: int | None = None,
        max_query_len: int | None,
        impl: Impl | None,
    ) -> None:
        self._mesh = mesh
        self._block_size = BLOCK_SIZES.get(platform(mesh), 16)
        self._blocks = num_blocks(tokens, len(starts) - 1, self._block_size)
        self._at = prompt_blocks(jnp.asarray(starts), tokens, self._block_size, longest)
        self._max_query_len = max_query_len
        self._impl = impl

    def __call__(
        self,
        q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        *,
        scale: float,
        reach: int | None = None,
        distance_bias: Float[Array, "kv_heads q_per_kv distances"] | None = None,
    ) -> Float[Array, "tokens kv_heads q_per_kv head_dim"]:
        """Return each token's mix of the values that it sees; 0 for padding."""

        def on_shard(q: Array, k: Array, v: Array, bias: Array | None, at: PromptBlocks) -> Array:
            if bias is not None:
                return biased_attention(q, k, v, bias, at, scale=scale, reach=reach).astype(q.dtype)
            last = at.ends - 1 if reach is None else jnp.minimum(at.places + reach, at.ends - 1)
            shape = view_shape(self._blocks, 1, k.shape[1], k.shape[2], self._block_size, k.dtype)
            view = kv_write(jnp.zeros(shape, k.dtype), 0, k, v, at.slots, impl=self._impl)
            return paged_attention(
                q,
                view,
                0,
                at.table,
                at.query_starts,
                at.lengths,
                scale=scale,
                sliding_window=None if reach is None else reach + 1,
                last_keys=last,
                max_query_len=self._max_query_len,
                impl=self._impl,
            )

        heads, whole = PartitionSpec(None, TENSOR_AXIS), PartitionSpec()
        specs = (heads, heads, heads, PartitionSpec(TENSOR_AXIS), whole)
        sharded = over_tensor(on_shard, self._mesh, in_specs=specs, out_specs=heads)
        return sharded(q, k, v, distance_bias, self._at)


class SegmentAttention:
    """Attends within the segments of a row of patches; see `jpaged.model_api.AttendWithinSegments`. Used while tracing.

    Args:
        kinds: those of the row's layout.
        starts: first patch of each segment of a kind, and where the last one ends, by the kind's name.
        patches: length of the row.
    """

    def __init__(
        self,
        mesh: Mesh,
        kinds: Sequence[SegmentKind],
        starts: Mapping[str, Int[HostOrDevice, " segments+1"]],
        patches: int,
        *,
        impl: Impl | None,
    ) -> None:
        self._within = {
            kind.name: PromptAttention(
                mesh,
                starts[kind.name],
                patches,
                longest=kind.longest,
                max_query_len=None,
                impl=impl,
            )
            for kind in kinds
        }

    def __call__(
        self,
        segments: str,
        q: Float[Array, "patches kv_heads q_per_kv head_dim"],
        k: Float[Array, "patches kv_heads head_dim"],
        v: Float[Array, "patches kv_heads head_dim"],
        *,
        scale: float,
    ) -> Float[Array, "patches kv_heads q_per_kv head_dim"]:
        """Return each patch's mix of the values of its segment; 0 for padding."""
        return self._within[segments](q, k, v, scale=scale)
