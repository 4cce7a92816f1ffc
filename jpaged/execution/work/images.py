"""Encodes the images of a step and leaves their features in the pool."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int

from jpaged.execution.caches.base import Pool
from jpaged.execution.encode import Prepared, calls, feature_rows, image_group, no_rows, numbers_together
from jpaged.execution.mesh import num_replicas, platform, stack
from jpaged.execution.programs import Compile
from jpaged.execution.work.base import PoolWork, WorkContext
from jpaged.scheduling.step import Encode
from jpaged.scheduling.work import ENCODES


class Images(PoolWork):
    """Encodes images, those of one shape together."""

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
        for replica, encodes in enumerate(each):
            for encode in encodes:
                first = 0
                for image in encode.image.each:
                    rows = feature_rows(self._spec, encode.stored, first, image.features)
                    shape = len(rows), *sorted((name, array.shape) for name, array in image.arrays.items())
                    by_shape.setdefault(shape, [[] for _ in each])[replica].append((image.arrays, rows))
                    first += image.features
        for images in by_shape.values():
            example, image_rows = next(mine for mine in images if mine)[0]
            names = tuple(sorted(example))
            for call in calls(images, self._numbers(image_rows)):
                arrays, rows = stack(self._mesh, call)
                yield names, tuple(arrays[name] for name in names), rows

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
        for arrays, count in self._examples:
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
