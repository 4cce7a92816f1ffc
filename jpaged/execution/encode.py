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
from jpaged.execution.caches.images import ImageCache
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.replicas import pool_sharding, under_mesh
from jpaged.memory import PoolLayout, StoredImage
from jpaged.memory.policies import ImageFeatures

_LEAST_ROWS = 256
"""Features that a launch has places for at least; their number is a power of two."""


def make_encode(graphdef: nnx.GraphDef, spec: PoolSpec, mesh: Mesh, *, prefix: str = "") -> jax.stages.Wrapped:
    """Return ``encode(params, pool, arrays, rows) -> pool``; the pool is donated.

    `arrays` are one image's, by name, without an axis of images; `rows` say where its features go, as `ImageBatch.rows`
    does, and lie out of range where nothing is to be written. There may be more of either.

    Args:
        prefix: what the names of the model's layer groups begin with in `spec`.
    """

    def encode(params: Any, pool: Pool, arrays: Mapping[str, Array], rows: Int[Array, " features"]) -> Pool:
        model = nnx.merge(graphdef, params)
        name = prefix + model.image_group.name
        cache, its = next(pair for pair in zip(spec.caches, spec.slices, strict=True) if pair[0].group.name == name)
        assert isinstance(cache, ImageCache)
        with under_mesh(mesh):
            features = model.encode({name: array[None] for name, array in arrays.items()})[0]
            features, rows = features[: len(rows)], rows[: len(features)]
            return cache.write(mesh, spec.views[its.start], pool, features, rows)

    return jax.jit(encode, donate_argnums=1, out_shardings=pool_sharding(mesh))


def no_rows(count: int) -> np.ndarray:
    """Return rows of the pool for `count` features and as many more as are padding: all out of range."""
    return np.full(max(_LEAST_ROWS, 1 << (count - 1).bit_length()), np.iinfo(np.int32).max, np.int32)


def feature_rows(layout: PoolLayout, image: StoredImage) -> Int[np.ndarray, " rows"]:
    """Return the rows of the pool that an image's features go to, in order, and padding behind.

    Raises:
        RuntimeError: a block is out of the pool's range.
    """
    group = next(plan for plan in layout.groups if isinstance(plan.spec.policy, ImageFeatures))
    blocks, size = np.asarray(image.blocks, np.int32), group.spec.block_size
    if blocks.min() < 0 or blocks.max() >= group.num_blocks:
        raise RuntimeError(f"blocks {blocks.min()}..{blocks.max()} of an image are not in [0, {group.num_blocks})")
    feature = np.arange(image.features, dtype=np.int32)
    rows = no_rows(len(feature))
    rows[: len(feature)] = blocks[feature // size] * size + feature % size
    return rows
