"""Attention as a layer sees it: one fused projection, the engine's `Attend` on the paged cache, one more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import TENSOR_AXIS, Attend, HeadLayout, LayerRef, WeightSource, head_layout

from . import weights as convert
from .layers import RMSNorm, dot, random_param, zeros_param
from .rope import rotate


@dataclass(frozen=True)
class Heads:
    """A checkpoint's heads and their layout over tensor shards.

    `rotates_neighbours`: the checkpoint's rotation turns pairs (2i, 2i + 1) of a head, not (i, i + head_dim / 2).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    layout: HeadLayout
    rotates_neighbours: bool = False

    @classmethod
    def of(
        cls,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        tensor_parallel: int,
        *,
        rotates_neighbours: bool = False,
    ) -> Heads:
        """Raises ValueError when the query heads do not divide over the KV heads."""
        layout = head_layout(num_heads, num_kv_heads, tensor_parallel)
        return cls(num_heads, num_kv_heads, head_dim, layout, rotates_neighbours)


class Attention(nnx.Module):
    """Grouped-query attention with optional biases, query/key norms and soft cap.

    Parameters: qkv [embed, kv_heads * (q_per_kv + 2) * head_dim], slot by slot the queries, the K and the V, of a layer
    that shares another's KV the queries only; out [kv_heads * q_per_kv * head_dim, embed]; their biases; norms over
    head_dim, before rotation; sinks [kv_heads * q_per_kv].
    """

    def __init__(
        self,
        embed: int,
        heads: Heads,
        *,
        scale: float,
        soft_cap: float | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: Callable[[], RMSNorm] | None = None,
        shares_kv: bool = False,
        sinks: bool = False,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        slots, share, width = heads.layout.kv_heads, heads.layout.q_per_kv, heads.head_dim
        columns = slots * (share + (0 if shares_kv else 2)) * width
        self.qkv = random_param(rngs, (embed, columns), dtype)
        self.qkv_bias = zeros_param((columns,), dtype) if qkv_bias else None
        self.out = random_param(rngs, (slots * share * width, embed), dtype)
        self.out_bias = zeros_param((embed,), dtype) if out_bias else None
        self.q_norm = None if qk_norm is None else qk_norm()
        self.k_norm = None if qk_norm is None or shares_kv else qk_norm()
        self.sinks = zeros_param((slots * share,), dtype) if sinks else None
        self.shares_kv = shares_kv
        self.heads = heads
        self.scale = scale
        self.soft_cap = soft_cap

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        tables: tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]] | None,
        cache: Any,
        ref: LayerRef,
        attend: Attend,
        growth: Float[Array, " tokens"] | None = None,
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        """`tables` are `Rotary.tables`, None for layers without rotation; `growth` multiplies each token's queries."""
        fused = dot(x, self.qkv[...])
        if self.qkv_bias is not None:
            fused = fused + self.qkv_bias[...]
        layout = self.heads.layout
        # Without the barrier XLA:TPU moves the reshape into the dot, and copies the weight to suit it.
        fused = jax.lax.optimization_barrier(fused).reshape(x.shape[0], layout.kv_heads, -1, self.heads.head_dim)
        q = self._placed(fused[:, :, : layout.q_per_kv], self.q_norm, tables)
        k = None if self.shares_kv else self._placed(fused[:, :, -2], self.k_norm, tables)
        v = None if self.shares_kv else fused[:, :, -1]
        if growth is not None:
            q = (q * growth[:, None, None, None]).astype(q.dtype)
        sinks = None if self.sinks is None else self.sinks[...].reshape(layout.kv_heads, layout.q_per_kv)
        cache, mixed = attend(cache, ref, q, k, v, scale=self.scale, soft_cap=self.soft_cap, sinks=sinks)
        out = dot(mixed.astype(x.dtype).reshape(x.shape[0], -1), self.out[...])
        return (out if self.out_bias is None else out + self.out_bias[...]), cache

    def _placed(self, x: Array, norm: RMSNorm | None, tables: tuple[Array, Array] | None) -> Array:
        """Queries or keys, normed and rotated to their positions."""
        if norm is not None:
            x = norm(x)
        return x if tables is None else rotate(x, tables)

    def weights(self, path: tuple[str, ...], name: str, layer: int, out_name: str = "o_proj") -> Iterator[WeightSource]:
        """Tensors ``{name}.q_proj`` and so on; `path` is this module's place in its layer."""
        heads = self.heads
        fuse = convert.fuse_qkv(
            heads.layout,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            rotates_neighbours=heads.rotates_neighbours,
        )
        split = convert.split_out(heads.layout, heads.num_heads, heads.head_dim)
        qkv = [f"{name}.{part}_proj" for part in ("q" if self.shares_kv else "qkv")]
        sources = [
            ("qkv", qkv, "weight", fuse, P(None, TENSOR_AXIS)),
            ("qkv_bias", qkv, "bias", fuse, P(TENSOR_AXIS)),
            ("out", (f"{name}.{out_name}",), "weight", split, P(TENSOR_AXIS, None)),
            ("out_bias", (f"{name}.{out_name}",), "bias", convert.as_stored, P(None)),
        ]
        for param, tensors, kind, how, partition in sources:
            if getattr(self, param) is not None:
                names, contracted = tuple(f"{t}.{kind}" for t in tensors), -2 if kind == "weight" else None
                unit = heads.head_dim if param == "out" else 0
                yield WeightSource((*path, param), names, how, partition, layer, contracted, unit)
        if self.sinks is not None:
            by_slot = convert.place_heads(heads.layout)
            yield WeightSource((*path, "sinks"), (f"{name}.sinks",), by_slot, P(TENSOR_AXIS), layer)
        for attribute in ("q_norm", "k_norm"):
            if (norm := getattr(self, attribute)) is not None:
                yield from norm.weights((*path, attribute), f"{name}.{attribute}", layer)
