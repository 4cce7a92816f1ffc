"""Makes the function that encodes images and leaves their features in the pool, and says how many at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jpaged.execution.caches.base import Pool
from jpaged.execution.caches.cross_attention import CrossAttentionCache
from jpaged.execution.caches.images import EncodedCache, blocks_of_image
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.image_rows import ImageRows
from jpaged.execution.mesh import Kind, each_replica, own_shapes, own_sharding, pool_sharding, under_mesh
from jpaged.execution.prompt_attention import SegmentAttention
from jpaged.images import GIVEN_FEATURES
from jpaged.memory import StoredImage
from jpaged.memory.layout import GroupLayout
from jpaged.model_api import CrossAttentionGroup, PacksImages, RowLayout
from jpaged.scheduling.held import sure_tokens
from pallas_kernels.platform import Impl

Prepared = tuple[Mapping[str, np.ndarray], np.ndarray]
"""An image's arrays by name, and the rows of the pool that its features go to."""

_TOGETHER = (4, 2, 1)
"""Images of one shape that a call may encode: each number is a program."""


def make_encode(
    graphdef: nnx.GraphDef, spec: PoolSpec, mesh: Mesh, *, prefix: str = "", kernel_impl: Impl | None = None
) -> jax.stages.Wrapped:
    """Return ``encode(params, pool, arrays, rows) -> pool``; the pool is donated.

    `arrays` are those of some images, by name, with an axis of images; or the features of images that the caller has
    encoded, by `GIVEN_FEATURES` alone, which are left in the pool as they are. `rows`, [images, rows], say where their
    features go, as `feature_rows` does, and lie out of range where nothing is to be written. On a data-parallel mesh
    both are those of all replicas, stacked. Of a `PacksImages` they are those of rows of images.

    Args:
        prefix: what the names of the model's layer groups begin with in `spec`.
        kernel_impl: see `make_step`.
    """

    def encode(params: Any, pool: Pool, arrays: Mapping[str, Array], rows: Int[Array, "images features"]) -> Pool:
        model = nnx.merge(graphdef, params)
        cache, group_slice = _encoded(spec, prefix + model.image_group.name)
        with under_mesh(mesh):
            given = arrays.get(GIVEN_FEATURES)
            if given is not None:
                encoded = given
            elif isinstance(model, PacksImages):
                packing, *row = _row_of(graphdef, params, mesh, arrays, kernel_impl)
                encoded = packing.encode(*row)[None]
            else:
                encoded = model.encode(arrays)
            for number, image_rows in enumerate(rows):
                own = jax.tree.map(lambda array, number=number: array[number], encoded)
                pool = cache.write(mesh, spec.views[group_slice.start], pool, own, image_rows, kernel_impl)
        return pool

    takes: tuple[Kind, ...] = ("shared", "split", "own", "own")
    return jax.jit(each_replica(encode, mesh, takes, "split"), donate_argnums=1, out_shardings=pool_sharding(mesh))


def make_encode_part(
    graphdef: nnx.GraphDef, spec: PoolSpec, mesh: Mesh, *, prefix: str = "", kernel_impl: Impl | None = None
) -> jax.stages.Wrapped:
    """Return ``encode_part(params, pool, state, arrays, rows, part) -> (pool, state)``, which does a part of `encode`
    for a row of images, of a model that `EncodesInParts`; pool and state are donated.

    `part` says which rounds of layers run, [first, stop). The first one begins with a new state, whatever `state` is;
    after the last one the features go to `rows`. Rounds below 0 change nothing, and a part that does not run takes no
    time. `between_parts` returns the shapes of a state. `arrays` lie where `own_sharding` says, as several parts take
    them.

    Args:
        prefix, kernel_impl: see `make_encode`.
    """

    def encode_part(
        params: Any,
        pool: Pool,
        state: Any,
        arrays: Mapping[str, Array],
        rows: Int[Array, "images features"],
        part: Int[Array, " 2"],
    ) -> tuple[Pool, Any]:
        group = nnx.merge(graphdef, params).image_group
        cache, group_slice = _encoded(spec, prefix + group.name)

        def begun() -> Any:
            model, *row = _row_of(graphdef, params, mesh, arrays, kernel_impl)
            return model.encode_first(*row)

        def features(state: Any) -> Array:
            model, *row = _row_of(graphdef, params, mesh, arrays, kernel_impl)
            found: Array = model.encode_last(*row, state)
            return found

        first, stop = part[0], part[1]
        with under_mesh(mesh):
            state = jax.lax.cond(first == 0, begun, lambda: state)
            model, *row = _row_of(graphdef, params, mesh, arrays, kernel_impl)
            state = model.encode_rounds(*row, state, first, stop)
            made = jax.eval_shape(features, state)
            nothing = partial(jnp.zeros, made.shape, made.dtype)
            encoded = jax.lax.cond(stop == len(group.rounds), partial(features, state), nothing)
            pool = cache.write(mesh, spec.views[group_slice.start], pool, encoded, rows[0], kernel_impl)
        return pool, state

    takes: tuple[Kind, ...] = ("shared", "split", "own", "own", "own", "own")
    of_all = each_replica(encode_part, mesh, takes, ("split", "own"))
    return jax.jit(of_all, donate_argnums=(1, 2), out_shardings=(pool_sharding(mesh), own_sharding(mesh)))


def between_parts(
    graphdef: nnx.GraphDef, params: Any, mesh: Mesh, arrays: Mapping[str, Any], kernel_impl: Impl | None = None
) -> Any:
    """Return the shapes of the state between two parts of a row's encoding, for all replicas.

    Args:
        params: weights, or their shapes.
        arrays: those of a row of each replica.
    """

    def begun(params: Any, arrays: Mapping[str, Array]) -> Any:
        with under_mesh(mesh):
            model, *row = _row_of(graphdef, params, mesh, arrays, kernel_impl)
            return model.encode_first(*row)

    return own_shapes(jax.eval_shape(each_replica(begun, mesh, ("shared", "own"), "own"), params, arrays), mesh)


class RowLengths(NamedTuple):
    """The lengths of the rows that an engine encodes, ascending; one may be in both.

    Attributes:
        whole: of those that are encoded in one step.
        in_parts: of those that are encoded over several.
    """

    whole: tuple[int, ...]
    in_parts: tuple[int, ...]


def row_lengths(group: Any, rows: ImageRows, *, max_num_batched_tokens: int, max_num_seqs: int) -> RowLengths:
    """Return the lengths of rows for which an engine has programs.

    Args:
        group: what holds what the encoder makes.
    """
    sure = sure_tokens(max_num_batched_tokens, max_num_seqs)
    in_parts = rows.lengths_above(sure / group.work) if len(group.rounds) > 1 else ()
    whole = rows.lengths_up_to(max_num_batched_tokens / group.work) if in_parts else rows.lengths
    return RowLengths(whole, in_parts)


def _row_of(
    graphdef: nnx.GraphDef, params: Any, mesh: Mesh, arrays: Mapping[str, Array], impl: Impl | None
) -> tuple[Any, Mapping[str, Array], SegmentAttention]:
    """Return the model, made for the trace that calls this, a row of images, and its attention."""
    model = nnx.merge(graphdef, params)
    layout: RowLayout = model.row_layout
    row = {name: array[0] for name, array in arrays.items()}
    patches = len(row[layout.patches[0].name])
    return model, row, SegmentAttention(mesh, layout.segments, row, patches, impl=impl)


def numbers_together(group: Any, rows: int, budget: int, *, platform: str) -> tuple[int, ...]:
    """Return how many images of a shape a call may encode, most first: as many as a step's budget has, or as stand
    together in a prompt. A CPU encodes one by one, as one fills all its cores.

    Args:
        group: what holds what the encoder makes.
        rows: rows of the pool that a call has places for, for each image; at least its features.
        budget: most tokens of a step; an image counts as many as it has features, or all.
    """
    most = budget // min(rows, budget)
    if isinstance(group, CrossAttentionGroup):
        most = max(most, group.most_together)
    return tuple(number for number in _TOGETHER if number == 1 or (number <= most and platform != "cpu"))


def calls(each: Sequence[Sequence[Prepared]], numbers: Sequence[int]) -> Iterator[list[Prepared]]:
    """Yield the calls of the encoder for images of one shape, some of each replica: stacked arrays and rows, one for
    each replica. Where a replica has fewer than the call, blank images whose features go nowhere stand for the others.

    Args:
        each: the images of each replica.
        numbers: how many images a call may have, most first, 1 among them.
    """
    done, most = 0, max(map(len, each))
    (arrays, rows), *_ = next(images for images in each if images)
    blank = {name: np.zeros_like(array) for name, array in arrays.items()}, np.full_like(rows, np.iinfo(np.int32).max)
    while done < most:
        number = next(number for number in numbers if number <= most - done)
        call: list[Prepared] = []
        for images in each:
            mine = [*images[done : done + number]]
            mine += [blank] * (number - len(mine))
            call.append(
                ({name: np.stack([one[0][name] for one in mine]) for name in arrays}, np.stack([r for _, r in mine]))
            )
        yield call
        done += number


def no_rows(spec: PoolSpec, count: int) -> np.ndarray:
    """Return rows of the pool for `count` features and as many more as are padding: all out of range."""
    return np.full(_encoded(spec)[0].launch_rows(count), np.iinfo(np.int32).max, np.int32)


def feature_rows(spec: PoolSpec, stored: StoredImage, first: int, count: int) -> Int[np.ndarray, " rows"]:
    """Return the rows of the pool that `count` features of what is stored go to, from number `first` on, in order, and
    padding after them.

    Raises:
        RuntimeError: a block is out of the pool's range.
    """
    group = _group(spec)
    blocks, size = blocks_of_image(stored.blocks, group), group.spec.block_size
    feature = np.arange(first, first + count, dtype=np.int32)
    rows = no_rows(spec, count)
    rows[:count] = blocks[feature // size] * size + feature % size
    return rows


def decodes_read_images(spec: PoolSpec) -> bool:
    """Tell whether tokens that are generated read images too."""
    return any(isinstance(cache, CrossAttentionCache) for cache in spec.caches)


def image_group(spec: PoolSpec) -> Any:
    """Return the layer group that keeps the encoder's features."""
    return _encoded(spec)[0].group


def _encoded(spec: PoolSpec, name: str | None = None) -> tuple[EncodedCache, slice]:
    """Return the cache of this name that keeps images, and the number of its group in the layout."""
    for cache, group_slice in zip(spec.caches, spec.slices, strict=True):
        if isinstance(cache, EncodedCache) and name in (None, cache.group.name):
            return cache, group_slice
    raise ValueError(f"no layer group {name or ''} keeps what an encoder makes of images")


def _group(spec: PoolSpec) -> GroupLayout:
    return spec.layout.groups[_encoded(spec)[1].start]
