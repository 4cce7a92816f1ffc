"""Makes the pool, one donated array that holds every layer group's blocks, and the views that kernels see of it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jpaged.execution.caches.base import BlockSettings, LayerCache, Pool, group_specs
from jpaged.execution.caches.registry import layer_caches
from jpaged.execution.mesh import is_local, num_replicas, platform, pool_sharding
from jpaged.memory.layout import PoolLayout
from jpaged.model_api import LayerGroup
from pallas_kernels.layout import LANES
from pallas_kernels.zero_pages import zero_pages, zeros


@dataclass(frozen=True)
class PoolSpec:
    """Describes the pool and its views on one device.

    Attributes:
        layout: the host's plan, in bytes; its groups are those of all `caches`, in order.
        caches: one for each layer group of the model; none for a model that keeps nothing.
        settings: what all blocks share, if there may be none; None = the settings of the caches.
    """

    layout: PoolLayout
    caches: tuple[LayerCache, ...]
    settings: BlockSettings | None = None

    @classmethod
    def plan(cls, caches: Sequence[LayerCache], pool_bytes: int, settings: BlockSettings | None = None) -> PoolSpec:
        """Cut `pool_bytes` (a device) into large pages for the model's layer groups.

        Raises:
            ValueError: `pool_bytes` holds no large page.
        """
        return cls(PoolLayout.plan(group_specs(caches), pool_bytes), tuple(caches), settings)

    def resized(self, pool_bytes: int) -> PoolSpec:
        """Return the same layer groups in a pool of another size."""
        return self.plan(self.caches, pool_bytes, self.settings)

    @property
    def dtype(self) -> jnp.dtype:
        """Return the dtype of every element."""
        return self._shared.dtype

    @property
    def shards(self) -> int:
        """Return the number of tensor shards; each holds its own share of every block."""
        return self._shared.shards

    @property
    def _shared(self) -> BlockSettings:
        return self.caches[0].format if self.settings is None else self.settings

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Return which of the layout's groups each of `caches` has."""
        stops = accumulate((len(cache.pool_groups()) for cache in self.caches), initial=0)
        return tuple(slice(start, stop) for start, stop in pairwise(stops))

    @cached_property
    def views(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape on one device of each view, one for each of the layout's groups."""
        return tuple(
            cache.view(layout)
            for cache, group_slice in zip(self.caches, self.slices, strict=True)
            for layout in self.layout.groups[group_slice]
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return the pool's shape, ``[tensor_shards, large_pages, rows, 128]``."""
        rows = self.layout.page_bytes // (LANES * self.dtype.itemsize)
        return (self.shards, self.layout.num_pages, rows, LANES)

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the pool on one device."""
        return self.layout.page_bytes * self.layout.num_pages


def plan_pool(
    groups: Sequence[LayerGroup],
    *,
    block_size: int,
    dtype: jnp.dtype,
    shards: int,
    pool_bytes: int,
    tile: int = 1,
    state_interval: int = 512,
    most_drafts: int = 0,
) -> PoolSpec:
    """Cut `pool_bytes` (a device) into large pages for the model's layer groups; see `BlockSettings`.

    Raises:
        ValueError: `pool_bytes` holds no large page, or a group is of an unknown kind.
    """
    form = BlockSettings(block_size, jnp.dtype(dtype), shards, tile, state_interval, most_drafts=most_drafts)
    return PoolSpec.plan(layer_caches(groups, form), pool_bytes)


def abstract_pool(spec: PoolSpec, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return the shape and sharding of the pools of all replicas: ``[replicas * tensor_shards, large_pages, rows,
    128]``."""
    shards, *rest = spec.shape
    shape = (num_replicas(mesh) * shards, *rest)
    return jax.ShapeDtypeStruct(shape, spec.dtype, sharding=pool_sharding(mesh))


def make_pool(spec: PoolSpec, mesh: Mesh) -> Pool:
    """Return zeroed pools on the mesh's devices. A CPU's pages take memory from their first write on; see
    `zero_pages`."""
    like = abstract_pool(spec, mesh)
    if platform(mesh) != "cpu" or not spec.caches:
        return jax.jit(lambda: jnp.zeros(like.shape, like.dtype), out_shardings=like.sharding)()
    own = partial(zeros, (1, *like.shape[1:]), like.dtype)
    everywhere = jax.shard_map(own, mesh=mesh, in_specs=(), out_specs=like.sharding.spec, check_vma=False)
    return jax.jit(everywhere)()


def make_zero_pages(mesh: Mesh) -> jax.stages.Wrapped:
    """Return ``zero(pool, unused) -> pool``, which zeroes pages where `unused`, ``[replicas * tensor_shards,
    large_pages]``, is true. The pool is donated."""
    split = pool_sharding(mesh).spec
    everywhere = jax.shard_map(zero_pages, mesh=mesh, in_specs=(split, split), out_specs=split, check_vma=False)
    return jax.jit(everywhere, donate_argnums=0)


class DonatedPool:
    """Holds the pool. Every program that changes it takes it as a donation and returns its successor.

    A thread makes it, where no other process has a part in that: a CPU takes a second to map a gigabyte, and warming up
    does not need it.
    """

    def __init__(self, spec: PoolSpec, mesh: Mesh) -> None:
        thread = ThreadPoolExecutor(1, thread_name_prefix="jpaged-pool")
        self._made = thread.submit(make_pool, spec, mesh)
        thread.shutdown(wait=not is_local(mesh))
        self._array: jax.Array | None = None

    @property
    def array(self) -> jax.Array:
        """Return the pool, once all calls made so far are done.

        Raises:
            Exception: whatever kept it from being made.
        """
        if self._array is None:
            self._array = self._made.result()
        return self._array

    @array.setter
    def array(self, array: jax.Array) -> None:
        self._array = array

    def delete(self) -> None:
        """Give back the memory, where there is any: the pool may not have been made, or a call may have taken it."""
        array = self._array
        if array is None and self._made.exception() is None:
            array = self._made.result()
        if array is not None and not array.is_deleted():
            array.delete()
