"""Decides which images a call of the encoder takes: those of one shape, as many as may be encoded together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from jpaged.execution.encode import Prepared, calls, feature_rows
from jpaged.execution.replicas import stack
from jpaged.execution.worker import Worker
from jpaged.scheduling.step import Encode


class EncoderCalls:
    """Gives a worker the images of each step.

    Args:
        numbers: tells how many images whose features take these rows of the pool a call may have, most first.
    """

    def __init__(self, worker: Worker, numbers: Callable[[np.ndarray], tuple[int, ...]]) -> None:
        self._worker = worker
        self._numbers = numbers

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
