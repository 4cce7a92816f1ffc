"""Makes the function that encodes an image and leaves its features in the pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jpaged.execution.caches.base import Pool
from jpaged.execution.caches.images import ImageCache
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.replicas import pool_sharding, under_mesh


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
