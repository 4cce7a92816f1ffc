"""Computes attention as a layer sees it: one fused projection, the engine's `Attend` on the paged cache, one more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import (
    TENSOR_AXIS,
    Attend,
    AttendWithinPrompts,
    BuildContext,
    HeadLayout,
    LayerRef,
    WeightSource,
    head_layout,
)
from pallas_kernels.rotated_heads import HeadNorms, rotated_heads, takes
from pallas_kernels.stacked_row import StackedRow

from . import weights as convert
from .heads_norm import HeadsNorm
from .layers import RMSNorm
from .linear import Linear, LiveRows, in_turn
from .parameters import constant_param
from .rope import RotaryTables, rotate, rotate_by_product
from .shards import each_shard
from .stack import Shared


@dataclass(frozen=True)
class Heads:
    """Describes a checkpoint's heads and their layout over tensor shards.

    Attributes:
        rotates_neighbours: the checkpoint's rotation turns pairs (2i, 2i + 1) of a head, not (i, i + head_dim / 2).
        rotated: how many numbers of a head are rotated, the first ones; None = all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    layout: HeadLayout
    rotates_neighbours: bool = False
    rotated: int | None = None

    @classmethod
    def of(
        cls,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        build: BuildContext,
        *,
        rotates_neighbours: bool = False,
        rotated: int | None = None,
    ) -> Heads:
        """Lay heads over the context's shards.

        Raises:
            ValueError: the query heads do not divide over the KV heads.
        """
        layout = head_layout(num_heads, num_kv_heads, build.tensor_parallel)
        return cls(num_heads, num_kv_heads, head_dim, layout, rotates_neighbours, rotated)

    @classmethod
    def of_config(cls, config: Any, build: BuildContext) -> Heads:
        """Lay the heads of a config of the usual fields over the context's shards: ``num_attention_heads``,
        ``num_key_value_heads`` and ``head_dim``. Without a ``head_dim`` the query heads share ``hidden_size``.

        Raises:
            ValueError: see `of`.
        """
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls.of(config.num_attention_heads, config.num_key_value_heads, head_dim, build)


@dataclass(frozen=True)
class ProjectionNames:
    """A checkpoint's names of attention's projections, after the block's.

    Attributes:
        qkv: of Q, K and V; or one name for a tensor with the rows of all three, one after another.
        by_head: such a tensor has each head's rows of Q, K and V in turn.
    """

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    by_head: bool = False


class Attention(nnx.Module):
    """Computes grouped-query attention with optional biases, query/key norms, gates and soft cap.

    Parameters: qkv [embed, kv_heads * (q_per_kv + 2) * head_dim], slot by slot the queries, the K and the V (the
    queries only in a layer that shares another's KV), with gates the gates of a slot after its queries, without the V
    where keys are values;
    out [kv_heads * q_per_kv * head_dim, embed]; norms over head_dim, before rotation; sinks [kv_heads * q_per_kv].

    Args:
        qk_norm: makes a norm of each head's queries and one of its keys; a maker with ``of_places = True`` is given
            the checkpoint's head in each place.
        norm_of_heads: epsilon of norms of a token's queries and keys over all heads together (OLMo), in their place.
        gated: each query head's result is multiplied by the sigmoid of a gate as wide (Qwen3-Next).
        v_norm: norms each head's values (Gemma 4).
        values_are_keys: the values are the keys before norm and rotation (Gemma 4).
        norms_after_rotation: queries and keys are normed after they are rotated (Hunyuan).
        rotates: False in a layer that knows no positions, though others of its group do (SmolLM3).
        inputs: width of what is attended from; None = `embed`, the width of the result.
        rows_at_once: tokens whose queries, keys and values are made at a time, see `in_turn`; None = all.
    """

    def __init__(
        self,
        embed: int,
        heads: Heads,
        build: BuildContext,
        *,
        scale: float,
        soft_cap: float | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: Callable[..., Any] | None = None,
        norm_of_heads: float | None = None,
        shares_kv: bool = False,
        sinks: bool = False,
        gated: bool = False,
        v_norm: RMSNorm | None = None,
        values_are_keys: bool = False,
        norms_after_rotation: bool = False,
        rotates: bool = True,
        inputs: int | None = None,
        rows_at_once: int | None = None,
    ):
        slots, share, width = heads.layout.kv_heads, heads.layout.q_per_kv, heads.head_dim
        columns = slots * (share * (2 if gated else 1) + (0 if shares_kv else 1 if values_are_keys else 2)) * width
        self.qkv = Linear(inputs or embed, columns, build, partition=P(None, TENSOR_AXIS), bias=qkv_bias)
        self.out = Linear(slots * share * width, embed, build, partition=P(TENSOR_AXIS, None), bias=out_bias)

        def norm(head_of_place: Sequence[Any]) -> Any:
            if norm_of_heads is not None:
                return HeadsNorm(head_of_place, width, norm_of_heads, build)
            if qk_norm is None:
                return None
            return qk_norm(head_of_place) if getattr(qk_norm, "of_places", False) else qk_norm()

        self.q_norm = norm(heads.layout.q_of_slot)
        self.k_norm = None if shares_kv else norm(heads.layout.kv_of_slot)
        self.v_norm = None if shares_kv else v_norm
        self.sinks = constant_param(build, (slots * share,)) if sinks else None
        self.values_are_keys = values_are_keys
        self.norms_after_rotation = norms_after_rotation
        self.rotates = rotates
        self.shares_kv = shares_kv
        self.gated = gated
        self.heads = heads
        # A GPU launches one kernel in the place of three, a TPU one in the place of five operations, and a CPU makes
        # one pass. XLA cannot cut a GPU's launch for shards; a TPU's is made by each. What a TPU's kernel does not take
        # is rotated by a product that carries the values along: it takes longer for several small operations.
        norms = self.q_norm, self.k_norm
        self.norms_together = all(isinstance(norm, RMSNorm) and norm.scale is not None for norm in norms)
        plain = self.norms_together or self.q_norm is None
        plain = plain and v_norm is None and not (shares_kv or gated or values_are_keys or norms_after_rotation)
        self.rotates_together = plain and self.q_norm is None and build.product_impl in ("tpu", "tpu_interpret")
        whole = build.product_impl in ("cpu", "tpu", "tpu_interpret")
        whole = whole or (build.product_impl == "gpu" and build.tensor_parallel == 1)
        self.rotates_by = build.product_impl if plain and whole else None
        self.scale = scale
        self.soft_cap = soft_cap
        self.rows_at_once = rows_at_once

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        shared: Shared,
        cache: Any,
        ref: LayerRef,
        attend: Attend,
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        """Attend to the tokens' sequences; returns the projected result and the updated cache."""
        layout, growth = self.heads.layout, shared.growth.get(ref.group)
        tables = shared.tables[ref.group] if self.rotates else None
        q, k, v, gates = in_turn(self._placed_heads, self.rows_at_once, (x, tables), shared.live_rows)
        if growth is not None:
            q = (q * growth[:, None, None, None]).astype(q.dtype)
        sinks = None if self.sinks is None else self.sinks[...].reshape(layout.kv_heads, layout.q_per_kv)
        options: dict[str, Any] = {} if shared.read is None else {"last_keys": shared.read.last_keys}
        cache, mixed = attend(cache, ref, q, k, v, scale=self.scale, soft_cap=self.soft_cap, sinks=sinks, **options)
        if gates is not None:
            mixed = mixed * jax.nn.sigmoid(gates)
        return self.out(mixed.astype(x.dtype).reshape(x.shape[0], -1), shared.read_rows), cache

    def _placed_heads(
        self, given: tuple[Float[Array, "tokens embed"], RotaryTables | None], live_rows: LiveRows
    ) -> tuple[Array, Array | None, Array | None, Array | None]:
        """Return the queries, keys and values of tokens, see `_parts`, and the gates of the queries' results, if there
        are any."""
        (x, tables), share = given, self.heads.layout.q_per_kv
        # Without the barrier XLA:TPU moves the reshape into the dot, and copies the weight to suit it.
        fused = jax.lax.optimization_barrier(self.qkv(x, live_rows))
        fused = fused.reshape(x.shape[0], self.heads.layout.kv_heads, -1, self.heads.head_dim)
        return *self._parts(fused, tables), fused[:, :, share : 2 * share] if self.gated else None

    def _parts(
        self, fused: Float[Array, "tokens kv_heads rows head_dim"], tables: RotaryTables | None
    ) -> tuple[Array, Array | None, Array | None]:
        """Return the queries, keys and values, normed and rotated; no keys and values where those of another layer are
        shared."""
        if tables is not None and self._rotates_in_one_launch(fused, tables):
            return self._rotated_in_one_launch(fused, tables)
        if tables is not None and self.rotates_together:
            fused, tables = rotate_by_product(fused, tables, still=1), None
        q = self._placed(fused[:, :, : self.heads.layout.q_per_kv], self.q_norm, tables)
        if self.shares_kv:
            return q, None, None
        k, v = fused[:, :, -1 if self.values_are_keys else -2], fused[:, :, -1]
        return q, self._placed(k, self.k_norm, tables), v if self.v_norm is None else self.v_norm(v)

    def _rotates_in_one_launch(self, fused: Array, tables: RotaryTables) -> bool:
        """Tell whether a kernel takes the joined heads apart and rotates them."""
        half = tables[0].shape[1]
        return self.rotates_by is not None and takes(fused.dtype, self.rotates_by, shape=fused.shape, half=half)

    def _rotated_in_one_launch(
        self, fused: Float[Array, "tokens kv_heads rows head_dim"], tables: RotaryTables
    ) -> tuple[Array, Array, Array]:
        """Return the queries, keys and values as `rotated_heads` does, normed if this layer's are."""
        scales: list[Array | StackedRow] = []
        eps = offset = 0.0
        if self.norms_together:
            assert isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm)
            eps, offset = self.q_norm.eps, self.q_norm.offset
            scales = [norm.scale[...] for norm in (self.q_norm, self.k_norm) if norm.scale is not None]

        def turn(joined: Array, cos: Array, sin: Array, *scales: Array | StackedRow) -> tuple[Array, Array, Array]:
            assert self.rotates_by is not None
            norms = HeadNorms(scales[0], scales[1], eps, offset) if scales else None
            return rotated_heads(joined, cos, sin, norms, impl=self.rotates_by)

        if self.rotates_by in ("tpu", "tpu_interpret"):
            heads = P(None, TENSOR_AXIS)
            return each_shard(turn, (heads, *[P()] * (2 + len(scales))), heads)(fused, *tables, *scales)
        return turn(fused, *tables, *scales)

    def _placed(self, x: Array, norm: Any, tables: RotaryTables | None) -> Array:
        """Return the queries or keys, normed and rotated to their positions."""
        if norm is not None and not self.norms_after_rotation:
            x = norm(x)
        if tables is not None:
            x = rotate(x, tables)
        return norm(x) if norm is not None and self.norms_after_rotation else x

    def weights(
        self,
        path: tuple[str, ...],
        name: str,
        layer: int | None,
        out_name: str = "o_proj",
        norm_names: tuple[str, str] = ("q_norm", "k_norm"),
        projections: ProjectionNames | None = None,
    ) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.q_proj`` and so on; `path` is this module's place in its layer."""
        heads = self.heads
        fuse = convert.fuse_qkv(
            heads.layout,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            rotates_neighbours=heads.rotates_neighbours,
            gated=self.gated,
            rotated=heads.rotated,
        )
        split = convert.split_out(heads.layout, heads.num_heads, heads.head_dim)
        names = projections or ProjectionNames(out=out_name)
        stored = names.qkv[: 1 if self.shares_kv else 2 if self.values_are_keys else 3]
        if len(names.qkv) == 1:
            fuse = convert.of_joined_qkv(
                fuse, heads.num_heads, heads.num_kv_heads, heads.head_dim, by_head=names.by_head
            )
        qkv = [f"{name}.{part}" for part in stored]
        yield from self.qkv.weights((*path, "qkv"), qkv, layer, fuse, fuse)
        yield from self.out.weights((*path, "out"), (f"{name}.{names.out}",), layer, split, unit=heads.head_dim)
        if self.sinks is not None:
            by_slot = convert.place_heads(heads.layout)
            yield WeightSource((*path, "sinks"), (f"{name}.sinks",), by_slot, P(TENSOR_AXIS), layer)
        for attribute, norm_name in zip(("q_norm", "k_norm"), norm_names, strict=True):
            if (norm := getattr(self, attribute)) is not None:
                yield from norm.weights((*path, attribute), f"{name}.{norm_name}", layer)


def both_ways(
    within: AttendWithinPrompts | Attend,
    reach: int | None,
    bias: Float[Array, "kv_heads q_per_kv distances"] | None = None,
) -> Attend:
    """Return the engine's attention within prompts as layers of the groups "full" and "window" call it.

    Args:
        reach: tokens that a token of a layer of the group "window" sees on each side.
        bias: see `AttendWithinPrompts`.
    """
    attend: Any = within  # one callback serves layers of every kind

    def of_group(cache: Any, group: str, q: Array, k: Array, v: Array, scale: float) -> tuple[Any, Array]:
        seen = reach if group == "window" else None
        return attend(cache, None, q, k, v, scale=scale, reach=seen, distance_bias=bias)

    return plainly(of_group)


def plainly(attend: Callable[[Any, str, Array, Array, Array, float], tuple[Any, Array]]) -> Attend:
    """Return attention without soft caps and sinks as layers call it.

    Args:
        attend: takes the cache, the name of the layer's group, queries, keys, values and the scale.
    """

    def of_layer(
        cache: Any,
        layer: LayerRef,
        q: Array,
        k: Array,
        v: Array,
        *,
        scale: float,
        soft_cap: float | None,
        sinks: Array | None,
    ) -> tuple[Any, Array]:
        if soft_cap is not None or sinks is not None:
            raise ValueError("attention in both directions has neither soft caps nor sinks")
        return attend(cache, layer.group, q, k, v, scale)

    return of_layer  # type: ignore[return-value]
