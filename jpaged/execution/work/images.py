"""Encodes the images of a step and leaves their features in the pool."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int

from jpaged.execution.caches.base import Pool
from jpaged.execution.encode import (
    Prepared,
    calls,
    feature_rows,
    image_group,
    no_rows,
    numbers_together,
    row_lengths,
)
from jpaged.execution.image_rows import ImageRows, Item
from jpaged.execution.mesh import num_replicas, platform, stack
from jpaged.execution.programs import Compile
from jpaged.execution.work.base import PoolWork, WorkContext
from jpaged.execution.work.image_parts import ImageParts
from jpaged.images import GIVEN_FEATURES
from jpaged.scheduling.step import Encode
from jpaged.scheduling.work import ENCODES


class Images(PoolWork):
    """Encodes images, those of one shape together or, where the model packs them, those that fit into a row.

    Attributes:
        parts: encodes images over several steps; None where the model does not pack them.
    """

    kind: ClassVar[str] = ENCODES
    needed: ClassVar[bool] = True

    def __init__(self, context: WorkContext) -> None:
        self._spec = context.spec
        self._mesh = context.mesh
        self._settings = context.settings
        self._model = context.model
        self._examples = context.examples
        packer = self._settings.image_rows
        self.parts: ImageParts | None = None
        if packer is not None:
            self.parts = ImageParts(self._spec, self._mesh, self._model, packer)

    def calls(self, each: Sequence[Sequence[Encode]]) -> Iterator[tuple[Any, ...]]:
        by_shape: dict[Hashable, list[list[Prepared]]] = {}
        packer = self._settings.image_rows
        to_pack: list[list[Item]] = [[] for _ in each]
        for replica, encodes in enumerate(each):
            for encode in encodes:
                if encode.part is not None:
                    continue
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
        if self.parts is not None:
            in_parts = [next((one for one in encodes if one.part is not None), None) for encodes in each]
            yield from self.parts.calls(in_parts)

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
        part: Int[np.ndarray, "*replicas 2"] | None = None,
        patches: int = 0,
    ) -> Pool:
        """Encode some images of one shape and leave their features in `rows` of the pool.

        Args:
            names, arrays: the encoder's arguments, with an axis of images.
            part: the rounds of layers that run over a row of each replica, see `ImageParts`; None = all.
            patches: of such a row.
        """
        by_name = dict(zip(names, arrays, strict=True))
        if part is None:
            return self._model.encode(pool, by_name, rows)
        assert self.parts is not None, "an encoder that takes images one by one was asked for a part"
        return self.parts.run(pool, by_name, rows, part, patches)

    def shapes(self) -> Iterator[tuple[str, Callable[[], Compile]]]:
        packer = self._settings.image_rows
        if packer is not None:
            yield from self._shapes_of_rows(packer)
            return
        for arrays, count in self._examples:
            image_rows = no_rows(self._spec, count)
            for number in self._numbers(image_rows):
                (call,) = calls([[(arrays, image_rows)] * number], (number,))
                of_all = stack(self._mesh, [call[0]] * num_replicas(self._mesh))
                yield f"image encoder, {number} x {count} features", partial(self._model.prepare_encode, *of_all)

    def _shapes_of_rows(self, packer: ImageRows) -> Iterator[tuple[str, Callable[[], Compile]]]:
        whole, in_parts = row_lengths(
            image_group(self._spec),
            packer,
            max_num_batched_tokens=self._settings.max_num_batched_tokens,
            max_num_seqs=self._settings.max_num_seqs,
        )
        for arrays, count in self._examples:
            each = [[Item(arrays, no_rows(self._spec, count)[:count])]] * num_replicas(self._mesh)
            if packer.patches(arrays) in whole:
                names, values, rows = self._call_of_row(packer, each)
                of_row = dict(zip(names, values, strict=True)), rows
                yield f"image encoder, a row of {count} features", partial(self._model.prepare_encode, *of_row)
            if packer.patches(arrays) in in_parts:
                assert self.parts is not None
                call = self.parts.sending(each, [(0, 0)] * len(each))
                of_part = dict(zip(call.names, call.arrays, strict=True)), call.rows, call.part
                name = f"image encoder, layers of a row of {count} features"
                yield name, partial(self._model.prepare_encode_part, *of_part)

    def release(self) -> None:
        if self.parts is not None:
            self.parts.clear()

    def close(self) -> None:
        self.release()

    def _numbers(self, rows: np.ndarray) -> tuple[int, ...]:
        """Return how many images whose features take these rows of the pool the encoder may take at once, most
        first."""
        if self._settings.deterministic:
            return (1,)  # the bits of an image may not depend on others
        budget = self._settings.max_num_batched_tokens
        return numbers_together(image_group(self._spec), len(rows), budget, platform=platform(self._mesh))
