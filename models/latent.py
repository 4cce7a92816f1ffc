"""Computes multi-head latent attention (DeepSeek-V2, 2024, section 2.1) in its absorbed form.

All heads share one latent a token. A head's keys would be ``k_up @ latent``, its values ``v_up @ latent``; as both are
linear, the query is taken to the latents' space instead, attends there, and what it finds is taken to values once. The
engine keeps the latents only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import TENSOR_AXIS, AttendToLatents, BuildContext, LayerRef, WeightSource

from . import weights as convert
from .layers import RMSNorm
from .linear import HeadLinear, Linear
from .rope import rotate
from .stack import Shared


@dataclass(frozen=True)
class LatentHeads:
    """Describes a checkpoint's heads.

    Attributes:
        num_heads: of the checkpoint.
        shards: tensor shards that they are split over.
        rank: width of the latent.
        query_rank: width that queries are compressed to; None = they are not.
        plain, rotary: widths of a query's part that is not rotated, and of the part that is.
        value: width of a head's values.
        rotates_neighbours: the checkpoint's rotation turns pairs (2i, 2i + 1), not (i, i + rotary / 2).
    """

    num_heads: int
    shards: int
    rank: int
    query_rank: int | None
    plain: int
    rotary: int
    value: int
    rotates_neighbours: bool

    @classmethod
    def of(cls, num_heads: int, build: BuildContext, **widths: Any) -> LatentHeads:
        """Lay the heads over the context's shards; `widths` are the other attributes."""
        return cls(num_heads, build.tensor_parallel, **widths)

    @property
    def slots(self) -> int:
        """Return how many heads parameters have: those of the checkpoint and zero ones after them."""
        return self.lines(1).size

    def lines(self, width: int) -> convert.Padded:
        """Return the size of an axis on which each head has `width` places."""
        return convert.Padded(self.num_heads, self.shards, width)


class LatentAttention(nnx.Module):
    """Attends to the latents of each token's sequence.

    Parameters: q_down [embed, query_rank] and q_norm, where queries are compressed; q_up [query_rank or embed, heads *
    (plain + rotary)]; kv_down [embed, rank + rotary], whole on every shard; kv_norm over the latent; kv_up
    [heads * (plain + value), rank], see `HeadLinear`; out [heads * value, embed].

    Args:
        scale: multiplies the scores.
        eps: epsilon of the norms.
        bias: whether q_down, kv_down and out have biases.
    """

    def __init__(
        self, embed: int, heads: LatentHeads, build: BuildContext, *, scale: float, eps: float, bias: bool = False
    ):
        compressed, whole = heads.query_rank, P(None, None)
        self.q_down = None if compressed is None else Linear(embed, compressed, build, partition=whole, bias=bias)
        self.q_norm = None if compressed is None else RMSNorm(compressed, eps, build)
        columns = heads.slots * (heads.plain + heads.rotary)
        self.q_up = Linear(compressed or embed, columns, build, partition=P(None, TENSOR_AXIS))
        self.kv_down = Linear(embed, heads.rank + heads.rotary, build, partition=whole, bias=bias)
        self.kv_norm = RMSNorm(heads.rank, eps, build)
        self.kv_up = HeadLinear(heads.lines(1), heads.plain, heads.value, heads.rank, build)
        self.out = Linear(heads.slots * heads.value, embed, build, partition=P(TENSOR_AXIS, None), bias=bias)
        self.heads = heads
        self.scale = scale

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        shared: Shared,
        cache: Any,
        ref: LayerRef,
        attend: AttendToLatents,
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        """Attend to the tokens' sequences; returns the projected result and the updated cache."""
        heads, live, tables = self.heads, shared.live_rows, shared.tables[ref.group]
        assert tables is not None
        row = self.kv_down(x, live)
        latent, key = self.kv_norm(row[:, : heads.rank]), rotate(row[:, heads.rank :], tables)
        q = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x, live))
        q = self.q_up(q, live).reshape(x.shape[0], heads.slots, -1)
        plain, turned = self.kv_up.into(q[..., : heads.plain]), rotate(q[..., heads.plain :], tables)
        query, row = jnp.concatenate([plain, turned], axis=-1), jnp.concatenate([latent, key], axis=-1)
        growth = shared.growth.get(ref.group)
        if growth is not None:
            query = (query * growth[:, None, None]).astype(query.dtype)
        cache, mixed = attend(cache, ref, query, row, scale=self.scale)
        values = self.kv_up.out_of(mixed.astype(x.dtype))
        return self.out(values.reshape(x.shape[0], -1), live), cache

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.q_proj`` or ``.q_a_proj`` and so on; `path` is this module's place
        in its layer."""
        heads, turn = self.heads, self.heads.rotates_neighbours
        queries = convert.rotary_last(heads.num_heads, heads.slots, heads.plain, heads.rotary, rotates_neighbours=turn)
        if self.q_down is None or self.q_norm is None:
            yield from self.q_up.weights((*path, "q_up"), (f"{name}.q_proj",), layer, queries)
        else:
            down = convert.linear(*self.q_down.weight.shape[-2:])
            yield from self.q_down.weights((*path, "q_down"), (f"{name}.q_a_proj",), layer, down)
            yield from self.q_norm.weights((*path, "q_norm"), f"{name}.q_a_layernorm", layer)
            yield from self.q_up.weights((*path, "q_up"), (f"{name}.q_b_proj",), layer, queries)
        rows = convert.rotary_last(1, 1, heads.rank, heads.rotary, rotates_neighbours=turn)
        yield from self.kv_down.weights((*path, "kv_down"), (f"{name}.kv_a_proj_with_mqa",), layer, rows, rows)
        yield from self.kv_norm.weights((*path, "kv_norm"), f"{name}.kv_a_layernorm", layer)
        yield from self.kv_up.weights((*path, "kv_up"), f"{name}.kv_b_proj", layer)
        out = convert.linear(heads.lines(heads.value), self.out.weight.shape[-1])
        yield from self.out.weights((*path, "out"), (f"{name}.o_proj",), layer, out)
