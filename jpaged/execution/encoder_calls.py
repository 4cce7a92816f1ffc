"""Decides which images a call of the encoder takes: those of one shape, as many as may be encoded together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import numpy as np

from jpaged.execution.encode import Prepared, calls, feature_rows, image_group, no_rows, numbers_together
from jpaged.execution.mesh import platform
from jpaged.execution.replicas import num_replicas, stack
from jpaged.execution.worker import Worker
from jpaged.scheduling.step import Encode


class EncoderCalls:
    """Gives a worker the images of each step.

    Args:
        examples: images to compile the encoder for, see `jpaged.model_api.SeesImages`.
        budget: most tokens of a step, see `numbers_together`.
        alone: whether every image is encoded by itself, as its bits may not depend on others.
    """

    def __init__(
        self,
        worker: Worker,
        examples: Sequence[tuple[Mapping[str, np.ndarray], int]],
        *,
        budget: int,
        alone: bool,
    ) -> None:
        self._worker = worker
        self._budget = budget
        self._alone = alone
        self._examples = examples

    def encode(self, each: Sequence[Sequence[Encode]]) -> None:
        """Encode the images of each replica, those of one shape together."""
        spec, mesh = self._worker.spec, self._worker.mesh
        by_shape: dict[Hashable, list[list[Prepared]]] = {}
        for replica, encodes in enumerate(each):
            for encode in encodes:
                first = 0
                for image in encode.image.each:
                    rows = feature_rows(spec, encode.stored, first, image.features)
                    shape = len(rows), *sorted((name, array.shape) for name, array in image.arrays.items())
                    by_shape.setdefault(shape, [[] for _ in each])[replica].append((image.arrays, rows))
                    first += image.features
        for images in by_shape.values():
            example, its_rows = next(mine for mine in images if mine)[0]
            names = tuple(sorted(example))
            for call in calls(images, self._numbers(its_rows)):
                arrays, rows = stack(mesh, call)
                self._worker.encode(names, tuple(arrays[name] for name in names), rows)

    def shapes(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield the calls' shapes: each one's name and its traced program's compilation."""
        mesh = self._worker.mesh
        for arrays, count in self._examples:
            its_rows = no_rows(self._worker.spec, count)
            for number in self._numbers(its_rows):
                (call,) = calls([[(arrays, its_rows)] * number], (number,))
                stacked, at = stack(mesh, [call[0]] * num_replicas(mesh))
                yield f"image encoder, {number} x {count} features", self._worker.prepare_encode(stacked, at)

    @property
    def num_shapes(self) -> int:
        """Return how many shapes `shapes` yields."""
        return sum(len(self._numbers(no_rows(self._worker.spec, count))) for _, count in self._examples)

    def _numbers(self, rows: np.ndarray) -> tuple[int, ...]:
        """Return how many images with these rows a call may have, most first."""
        if self._alone:
            return (1,)
        spec, mesh = self._worker.spec, self._worker.mesh
        return numbers_together(image_group(spec), len(rows), self._budget, platform=platform(mesh))
