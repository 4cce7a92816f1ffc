"""Makes the function that encodes an image and leaves its features in the pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jpaged.execution.caches.base import Pool
from jpaged.execution.caches.cross_attention import CrossAttentionCache
from jpaged.execution.caches.images import EncodedCache, blocks_of_image
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.replicas import pool_sharding, under_mesh
from jpaged.memory import StoredImage
from jpaged.memory.layout import GroupLayout
from pallas_kernels.platform import Impl


def make_encode(
    graphdef: nnx.GraphDef, spec: PoolSpec, mesh: Mesh, *, prefix: str = "", kernel_impl: Impl | None = None
) -> jax.stages.Wrapped:
    """Return ``encode(params, pool, arrays, rows) -> pool``; the pool is donated.

    `arrays` are one image's, by name, without an axis of images; `rows` say where its features go, as `feature_rows`
    does, and lie out of range where nothing is to be written. There may be more of either.

    Args:
        prefix: what the names of the model's layer groups begin with in `spec`.
        kernel_impl: see `make_step`.
    """

    def encode(params: Any, pool: Pool, arrays: Mapping[str, Array], rows: Int[Array, " features"]) -> Pool:
        model = nnx.merge(graphdef, params)
        cache, its = _encoded(spec, prefix + model.image_group.name)
        with under_mesh(mesh):
            encoded = model.encode({name: array[None] for name, array in arrays.items()})
            encoded = jax.tree.map(lambda array: array[0], encoded)
            return cache.write(mesh, spec.views[its.start], pool, encoded, rows, kernel_impl)

    return jax.jit(encode, donate_argnums=1, out_shardings=pool_sharding(mesh))


def no_rows(spec: PoolSpec, count: int) -> np.ndarray:
    """Return rows of the pool for `count` features and as many more as are padding: all out of range."""
    return np.full(_encoded(spec)[0].launch_rows(count), np.iinfo(np.int32).max, np.int32)


def feature_rows(spec: PoolSpec, stored: StoredImage, first: int, count: int) -> Int[np.ndarray, " rows"]:
    """Return the rows of the pool that `count` features of what is stored go to, from number `first` on, in order, and
    padding behind.

    Raises:
        RuntimeError: a block is out of the pool's range.
    """
    group = _group(spec)
    blocks, size = blocks_of_image(stored.blocks, group), group.spec.block_size
    feature = np.arange(first, first + count, dtype=np.int32)
    rows = no_rows(spec, count)
    rows[:count] = blocks[feature // size] * size + feature % size
    return rows


def sees_images_on(spec: PoolSpec) -> bool:
    """Tell whether tokens that are generated read images too."""
    return any(isinstance(cache, CrossAttentionCache) for cache in spec.caches)


def _encoded(spec: PoolSpec, name: str | None = None) -> tuple[EncodedCache, slice]:
    """Return what keeps images, of this name, and which of the layout's groups it has."""
    for cache, its in zip(spec.caches, spec.slices, strict=True):
        if isinstance(cache, EncodedCache) and name in (None, cache.group.name):
            return cache, its
    raise ValueError(f"no layer group {name or ''} keeps what an encoder makes of images")


def _group(spec: PoolSpec) -> GroupLayout:
    return spec.layout.groups[_encoded(spec)[1].start]
