"""Keeps the features of images, from their encoder until the tokens that stand for them have taken them.

Which image lies in which blocks the host says (`jpaged.memory.shared_blocks`). A block holds as many features as an
attention block holds tokens; each tensor shard keeps its own columns of them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jpaged.execution.caches.base import HostStep, LayerCache, LayerCall, Pool, Reads
from jpaged.execution.mesh import HostOrDevice, over_tensor
from jpaged.memory.layout import GroupLayout, GroupSpec
from jpaged.memory.policies import ImageFeatures
from jpaged.model_api import TENSOR_AXIS, ImageGroup
from jpaged.scheduling.held.images import ImageRead
from jpaged.scheduling.step import ScheduledStep
from pallas_kernels.layout import LANES
from pallas_kernels.platform import Impl

SUBLANES = 8
"""Rows of 128 numbers that lie together in a TPU's memory."""
_LEAST_ROWS = 256
"""Features that a launch has places for at least; their number is a power of two."""


class ImageBatch(NamedTuple):
    """Holds a step's arrays for images.

    Attributes:
        rows: which feature of the pool each token takes, ``block * block_size + place``; -1 for a token that stands for
            no image. None where no token does.
        places: where each token lies on the group's axes. None where it has one axis.
    """

    rows: Int[HostOrDevice, " tokens"] | None = None
    places: Int[HostOrDevice, "tokens axes"] | None = None


class EncodedCache(LayerCache):
    """Serves images' features, which an encoder writes to the pool before a step."""

    def untabled_blocks(self, step: ScheduledStep) -> Iterable[int]:
        return (block for read in step.rows.get(ImageFeatures.kind, ()) for block in read.blocks)

    @abstractmethod
    def launch_rows(self, features: int) -> int:
        """Return the number of the pool's rows in a launch of the encoder that makes `features` features."""

    @abstractmethod
    def write(
        self,
        mesh: Mesh,
        view: tuple[int, ...],
        pool: Pool,
        encoded: Any,
        rows: Int[HostOrDevice, " rows"],
        impl: Impl | None = None,
    ) -> Pool:
        """Write the features of one image to rows of the pool, which is updated in place.

        There may be more of either; rows out of range are dropped.

        Args:
            view: shape on one device of the pool as the group sees it.
            encoded: what `jpaged.model_api.TakesImages.encode` returns of the image, without the axis of images.
            rows: ``block * block_size + place`` of each feature.
            impl: version of the kernels; None = what the current platform is best at.
        """


@dataclass(frozen=True)
class ImageCache(EncodedCache):
    """Serves vectors that tokens take the place of."""

    group: ImageGroup
    Batch: ClassVar[type[tuple[Any, ...]]] = ImageBatch
    by_token: ClassVar[tuple[str, ...] | None] = ("rows", "places")

    @property
    def dtype(self) -> jnp.dtype:
        """Return the dtype of the features."""
        return jnp.dtype(self.group.dtype)

    @property
    def columns(self) -> int:
        """Return how many columns of a feature's level each shard keeps, those of padding included."""
        return -(-self.group.width // self.format.shards)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        elements = -(-self.group.levels * self.columns * self.dtype.itemsize // self.format.dtype.itemsize)
        return (self.format.block_size, -(-elements // LANES), LANES)

    def pool_groups(self) -> tuple[GroupSpec, ...]:
        policy = ImageFeatures(patches=self.group.patches, work=self.group.work, rounds=self.group.rounds)
        return (self.spec(self.group.name, 1, policy),)

    def reads(self) -> Reads:
        return Reads(0, None, 0)  # once for each token of an image, not for each token

    def batch(self, step: HostStep, tables: Sequence[np.ndarray], layouts: Sequence[GroupLayout]) -> Any:
        reads, places = image_reads(step), self._places(step)
        if reads is None:
            return ImageBatch(None, places)
        (layout,) = layouts
        size, rows = layout.spec.block_size, np.full(step.padded_tokens, -1, np.int32)
        for read, of_read in reads:
            feature = read.image.taken(read.start, read.stop)
            blocks = blocks_of_image(read.blocks, layout)
            rows[of_read] = np.where(feature < 0, -1, blocks[feature // size] * size + feature % size)
        return ImageBatch(rows, places)

    def _places(self, step: HostStep) -> Int[np.ndarray, "tokens axes"] | None:
        """Return the tokens' places on the group's axes; None where it has one.

        Raises:
            RuntimeError: a sequence has places on another number of axes.
        """
        axes = self.group.axes
        if axes == 1:
            return None
        places = np.zeros((step.padded_tokens, axes), np.int32)
        places[: len(step.positions)] = step.positions[:, None]
        row = 0
        for chunk in step.chunks:
            own = chunk.seq.places
            if own is not None:
                if own.axes != axes:
                    raise RuntimeError(f"sequence {chunk.seq.seq_id} has places on {own.axes} axes, not {axes}")
                places[row : row + chunk.length] = own.of(chunk.start, chunk.start + chunk.length)
            row += chunk.length
        return places

    def operate(
        self,
        call: LayerCall,
        pool: Pool,
        index: int | Int[Array, ""],
        hidden: Float[Array, "tokens embed"] | None = None,
        *,
        positions: Int[Array, " tokens"] | None = None,
    ) -> tuple[Pool, Array]:
        """Put features in the place of tokens that stand for images, or add their level `index` to them, see
        `jpaged.model_api.PlaceImageFeatures`; or return the places of tokens at `positions`, see
        `jpaged.model_api.PlaceOnAxes`."""
        if positions is not None:
            places = call.arrays.places
            return pool, positions[:, None] if places is None else jnp.asarray(places)
        assert hidden is not None
        rows = call.arrays.rows
        if rows is None:
            return pool, hidden

        def on_shard(pool, rows):
            parts, numbers = self._parts(pool, call.views[0], rows)
            own = self._features(parts[numbers])[:, index]
            # Gathered here: columns of their own would stay apart, and be gathered again by each layer.
            return jax.lax.all_gather(own, TENSOR_AXIS, axis=1, tiled=True)

        shard, whole = PartitionSpec(TENSOR_AXIS), PartitionSpec()
        taken = over_tensor(on_shard, call.mesh, in_specs=(shard, whole), out_specs=whole)(
            pool, jnp.maximum(jnp.asarray(rows), 0)
        )
        taken = taken[:, : self.group.width].astype(hidden.dtype)
        stands = jnp.asarray(rows)[:, None] >= 0
        if isinstance(index, int) and index == 0:
            return pool, jnp.where(stands, taken, hidden)
        return pool, jnp.where(stands, hidden + taken, hidden)

    def launch_rows(self, features: int) -> int:
        return max(_LEAST_ROWS, 1 << (features - 1).bit_length())

    def write(
        self,
        mesh: Mesh,
        view: tuple[int, ...],
        pool: Pool,
        encoded: Float[Array, "features embeds"],
        rows: Int[HostOrDevice, " rows"],
        impl: Impl | None = None,
    ) -> Pool:
        missing = self.columns * self.format.shards - self.group.width
        features, rows = encoded[: len(rows)], rows[: len(encoded)]
        features = features.astype(self.dtype).reshape(len(features), self.group.levels, self.group.width)
        features = jnp.pad(features, ((0, 0), (0, 0), (0, missing)))

        def on_shard(pool, features, rows):
            parts, numbers = self._parts(pool, view, rows)
            stored = self._stored(features).reshape(*numbers.shape, *parts.shape[1:])
            return parts.at[numbers].set(stored, mode="drop").reshape(pool.shape)

        shard, columns = PartitionSpec(TENSOR_AXIS), PartitionSpec(None, None, TENSOR_AXIS)
        sharded = over_tensor(on_shard, mesh, in_specs=(shard, columns, PartitionSpec()), out_specs=shard)
        return sharded(pool, features, rows)

    def _parts(self, pool: Array, view: tuple[int, ...], rows: Int[Array, " rows"]) -> tuple[Array, Array]:
        """Return the pool as parts of features, and the numbers of each row's; of a row out of range, numbers out of
        range.

        A part is as much of a row as lies in a TPU's memory as in the pool. Any other shape would be another layout
        there, for which XLA copies the whole pool: of rows of seven times 128 numbers into one with eight.
        """
        blocks, layers, size, tiles, _ = view
        part = tiles if tiles % SUBLANES == 0 else math.gcd(tiles, SUBLANES)
        part = 1 if part == 2 and pool.dtype.itemsize == 1 else part  # four rows of bytes are a row of words
        first = jnp.where(rows < blocks * size, rows // size * (layers * size) + rows % size, blocks * layers * size)
        return pool.reshape(-1, part, LANES), first[:, None] * (tiles // part) + jnp.arange(tiles // part)

    def _stored(self, features: Float[Array, "features levels columns"]) -> Array:
        """Return features as rows of a block, in the pool's dtype."""
        if self.dtype != self.format.dtype:
            features = jax.lax.bitcast_convert_type(features, self.format.dtype)
        flat = features.reshape(len(features), -1)
        tiles = self.layer_shape[1]
        return jnp.pad(flat, ((0, 0), (0, tiles * LANES - flat.shape[1]))).reshape(-1, tiles, LANES)

    def _features(self, stored: Array) -> Float[Array, "features levels columns"]:
        """Return rows of a block as features."""
        flat, ratio = stored.reshape(len(stored), -1), self.dtype.itemsize // self.format.dtype.itemsize
        shape = len(flat), self.group.levels, self.columns
        flat = flat[:, : self.group.levels * self.columns * ratio]
        if self.dtype == self.format.dtype:
            return flat.reshape(shape)
        if ratio > 1:
            flat = flat.reshape(len(flat), -1, ratio)
        return jax.lax.bitcast_convert_type(flat, self.dtype).reshape(shape)


def image_reads(step: HostStep) -> list[tuple[ImageRead, slice]] | None:
    """Return which tokens of which image a step's rows stand for, and these rows; None where its shape has no place for
    images."""
    reads: Sequence[ImageRead] | None = step.rows.get(ImageFeatures.kind)
    if reads is None:
        return None
    first = step.first_rows()
    return [(read, slice(first[read.seq_id] + read.start, first[read.seq_id] + read.stop)) for read in reads]


def blocks_of_image(blocks: Sequence[int], layout: GroupLayout) -> Int[np.ndarray, " blocks"]:
    """Return an image's blocks as an array.

    Raises:
        RuntimeError: one is out of the pool's range.
    """
    found = np.asarray(blocks, np.int32)
    if found.min() < 0 or found.max() >= layout.num_blocks:
        raise RuntimeError(f"blocks {found.min()}..{found.max()} of an image are not in [0, {layout.num_blocks})")
    return found
