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

    Parameters: qkv [embed, kv_heads * (q_per_kv + 2) * head_dim], slot by slot the queries, the K and the V;
    out [kv_heads * q_per_kv * head_dim, embed]; their biases; norms over head_dim, before rotation.
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
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        slots, share, width = heads.layout.kv_heads, heads.layout.q_per_kv, heads.head_dim
        self.qkv = random_param(rngs, (embed, slots * (share + 2) * width), dtype)
        self.qkv_bias = zeros_param((slots * (share + 2) * width,), dtype) if qkv_bias else None
        self.out = random_param(rngs, (slots * share * width, embed), dtype)
        self.out_bias = zeros_param((embed,), dtype) if out_bias else None
        self.q_norm = None if qk_norm is None else qk_norm()
        self.k_norm = None if qk_norm is None else qk_norm()
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
        fused = jax.lax.optimization_barrier(fused).reshape(
            x.shape[0], layout.kv_heads, layout.q_per_kv + 2, self.heads.head_dim
        )
        q, k, v = fused[:, :, :-2], fused[:, :, -2], fused[:, :, -1]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if tables is not None:
            q, k = rotate(q, tables), rotate(k, tables)
        if growth is not None:
            q = (q * growth[:, None, None, None]).astype(q.dtype)
        cache, mixed = attend(cache, ref, q, k, v, scale=self.scale, soft_cap=self.soft_cap)
        out = dot(mixed.astype(x.dtype).reshape(x.shape[0], -1), self.out[...])
        return (out if self.out_bias is None else out + self.out_bias[...]), cache

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
        qkv = f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"
        sources = [
            ("qkv", qkv, "weight", fuse, P(None, TENSOR_AXIS)),
            ("qkv_bias", qkv, "bias", fuse, P(TENSOR_AXIS)),
            ("out", (f"{name}.{out_name}",), "weight", split, P(TENSOR_AXIS, None)),
            ("out_bias", (f"{name}.{out_name}",), "bias", convert.as_stored, P(None)),
        ]
        for param, tensors, kind, how, partition in sources:
            if getattr(self, param) is not None:
                yield WeightSource((*path, param), tuple(f"{t}.{kind}" for t in tensors), how, partition, layer)
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.weights((*path, "q_norm"), f"{name}.q_norm", layer)
            yield from self.k_norm.weights((*path, "k_norm"), f"{name}.k_norm", layer)
