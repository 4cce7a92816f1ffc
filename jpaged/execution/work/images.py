"""Encodes the images of a step and leaves their features in the pool."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int

from jpaged.execution.caches.base import Pool
from jpaged.execution.encode import Prepared, calls, feature_rows, image_group, no_rows, numbers_together
from jpaged.execution.image_rows import ImageRows, Item
from jpaged.execution.mesh import num_replicas, platform, stack
from jpaged.execution.programs import Compile
from jpaged.execution.work.base import PoolWork, WorkContext
from jpaged.images import GIVEN_FEATURES
from jpaged.scheduling.step import Encode
from jpaged.scheduling.work import ENCODES


class Images(PoolWork):
    """Encodes images, those of one shape together or, where the model packs them, those that fit into a row."""

    kind: ClassVar[str] = ENCODES
    needed: ClassVar[bool] = True

    def __init__(self, context: WorkContext) -> None:
        self._spec = context.spec
        self._mesh = context.mesh
        self._settings = context.settings
        self._model = context.model
        self._examples = context.examples

    def calls(self, each: Sequence[Sequence[Encode]]) -> Iterator[tuple[Any, ...]]:
        by_shape: dict[Hashable, list[list[Prepared]]] = {}
        packer = self._settings.image_rows
        to_pack: list[list[Item]] = [[] for _ in each]
        for replica, encodes in enumerate(each):
            for encode in encodes:
                first = 0
                for image in encode.image.each:
                    rows = feature_rows(self._spec, encode.stored, first, image.features)
                    first += image.features
                    if packer is not None and GIVEN_FEATURES not in image.arrays:
                        to_pack[replica].append(Item(image.arrays, rows[: image.features]))
                        continue
                    shape = len(rows), *sorted((name, array.shape) for name, array in image.arrays.items())
                    by_shape.setdefault(shape, [[] for _ in each])[replica].append((image.arrays, rows))
        for images in by_shape.values():
            example, image_rows = next(mine for mine in images if mine)[0]
            names = tuple(sorted(example))
            for call in calls(images, self._numbers(image_rows)):
                arrays, rows = stack(self._mesh, call)
                yield names, tuple(arrays[name] for name in names), rows
        if packer is not None and any(to_pack):
            packed = [packer.packed(items, together=not self._settings.deterministic) for items in to_pack]
            for of_each in zip_longest(*packed, fillvalue=()):
                yield self._call_of_row(packer, of_each)

    def _call_of_row(self, packer: ImageRows, of_each: Sequence[Sequence[Item]]) -> tuple[Any, ...]:
        """Return the call that encodes a row of each replica, of these images."""
        arrays, rows = stack(self._mesh, packer.joined(of_each, partial(no_rows, self._spec)))
        names = tuple(sorted(arrays))
        return names, tuple(arrays[name] for name in names), rows

    def run(
        self,
        pool: Pool,
        names: Sequence[str],
        arrays: Sequence[np.ndarray],
        rows: Int[np.ndarray, "*replicas images features"],
    ) -> Pool:
        """Encode some images of one shape and leave their features in `rows` of the pool.

        Args:
            names, arrays: the encoder's arguments, with an axis of images.
        """
        return self._model.encode(pool, dict(zip(names, arrays, strict=True)), rows)

    def shapes(self) -> Iterator[tuple[str, Callable[[], Compile]]]:
        packer = self._settings.image_rows
        for arrays, count in self._examples:
            if packer is not None:
                example = Item(arrays, no_rows(self._spec, count)[:count])
                names, values, rows = self._call_of_row(packer, [[example]] * num_replicas(self._mesh))
                of_row = dict(zip(names, values, strict=True)), rows
                yield f"image encoder, a row of {count} features", partial(self._model.prepare_encode, *of_row)
                continue
            image_rows = no_rows(self._spec, count)
            for number in self._numbers(image_rows):
                (call,) = calls([[(arrays, image_rows)] * number], (number,))
                of_all = stack(self._mesh, [call[0]] * num_replicas(self._mesh))
                yield f"image encoder, {number} x {count} features", partial(self._model.prepare_encode, *of_all)

    def _numbers(self, rows: np.ndarray) -> tuple[int, ...]:
        """Return how many images whose features take these rows of the pool the encoder may take at once, most
        first."""
        if self._settings.deterministic:
            return (1,)  # the bits of an image may not depend on others
        budget = self._settings.max_num_batched_tokens
        return numbers_together(image_group(self._spec), len(rows), budget, platform=platform(self._mesh))
