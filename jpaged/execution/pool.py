"""The pool: one donated array that holds every layer group's blocks, and the views kernels see of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Shaped

from jpaged.execution.replicas import num_replicas, pool_sharding
from jpaged.memory.layout import GroupSpec, PoolLayout
from jpaged.memory.policies import ChunkedLocalAttention, FullAttention, Policy, PromptBudget, SlidingWindow
from jpaged.model_api import LayerGroup
from jpaged.pyramid_kv import PyramidKV
from pallas_kernels.layout import LANES, view_shape


@dataclass(frozen=True)
class PoolSpec:
    """Shape of the pool and of its views on one device.

    Attributes:
        layout: the host's plan, in bytes.
        dtype: of every element.
        shards: tensor shards; each holds its own heads' share of every block.
        views: per group, the view's shape on one device.
        groups: as the model describes them, or the bands that `kv_budget` cuts its one group into. Views of bands are
            all alike.
        kv_budget: how layers choose what they keep of a prompt; None = they keep all.
    """

    layout: PoolLayout
    dtype: jnp.dtype
    shards: int
    views: tuple[tuple[int, ...], ...]
    groups: tuple[LayerGroup, ...]
    group_index: dict[str, int]
    kv_budget: PyramidKV | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``[tensor_shards, large_pages, rows, 128]``."""
        rows = self.layout.page_bytes // (LANES * self.dtype.itemsize)
        return (self.shards, self.layout.num_pages, rows, LANES)

    @property
    def device_bytes(self) -> int:
        return self.layout.page_bytes * self.layout.num_pages


def group_specs(
    groups: tuple[LayerGroup, ...], *, block_size: int, dtype: jnp.dtype, shards: int, tile: int = 1
) -> list[GroupSpec]:
    """The model's layer groups in the host's terms: bytes on one device. `tile`: see `plan_pool`."""
    specs = []
    for group in groups:
        one = view_shape(1, 1, group.kv_heads // shards, group.head_dim, block_size, dtype, tile)
        layer_bytes = prod(one) * jnp.dtype(dtype).itemsize
        specs.append(GroupSpec(group.name, layer_bytes, len(group.layers), block_size, _policy(group)))
    return specs


def _policy(group: LayerGroup) -> Policy:
    if group.prompt_budget is not None:
        return PromptBudget(group.prompt_budget)
    if group.sliding_window is not None:
        return SlidingWindow(group.sliding_window)
    return FullAttention() if group.chunk_size is None else ChunkedLocalAttention(group.chunk_size)


def plan_pool(
    groups: tuple[LayerGroup, ...],
    *,
    block_size: int,
    dtype: jnp.dtype,
    shards: int,
    pool_bytes: int,
    tile: int = 1,
    kv_budget: PyramidKV | None = None,
) -> PoolSpec:
    """Cut `pool_bytes` (a device) into large pages for the model's groups.

    Args:
        tile: rows of which a block is a multiple, see `rows_tile`.

    Raises:
        ValueError: `pool_bytes` holds no large page.
    """
    specs = group_specs(groups, block_size=block_size, dtype=dtype, shards=shards, tile=tile)
    layout = PoolLayout.plan(specs, pool_bytes, alike=kv_budget is not None)
    views = tuple(
        view_shape(
            plan.num_blocks, plan.padded_layers, group.kv_heads // shards, group.head_dim, block_size, dtype, tile
        )
        for plan, group in zip(layout.groups, groups, strict=True)
    )
    index = {group.name: i for i, group in enumerate(groups)}
    return PoolSpec(layout, jnp.dtype(dtype), shards, views, groups, index, kv_budget)


def abstract_pool(spec: PoolSpec, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Shape and place of the pools of all replicas: ``[replicas * tensor_shards, large_pages, rows, 128]``."""
    shards, *rest = spec.shape
    shape = (num_replicas(mesh) * shards, *rest)
    return jax.ShapeDtypeStruct(shape, spec.dtype, sharding=pool_sharding(mesh))


def make_pool(spec: PoolSpec, mesh: Mesh) -> Shaped[Array, "shards pages rows 128"]:
    """Zeroed pools on the mesh's devices."""
    like = abstract_pool(spec, mesh)
    return jax.jit(lambda: jnp.zeros(like.shape, like.dtype), out_shardings=like.sharding)()
