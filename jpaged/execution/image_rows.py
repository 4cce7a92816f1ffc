"""Packs the images of a step into rows of patches, as a tower takes them that says so (`PacksImages`).

A row has one of few lengths, so that few programs are compiled, and what is beyond its images is padding. A CPU's
products and attention leave it out (`live_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jpaged.model_api import PacksImages, RowArray, RowLayout, TakesImages

EIGHTHS, SMALL = 8, (2, 4)
"""Parts of the longest row by which lengths lie apart, and what the first of these is divided by for small images."""

ENOUGH = 1 << 13
"""Patches of a row that keep any device busy: weights are then read for so many that longer rows are no faster."""


class Item(NamedTuple):
    """An image's arrays by name, and the rows of the pool that its features go to."""

    arrays: Mapping[str, np.ndarray]
    rows: Int[np.ndarray, " features"]


class Row(NamedTuple):
    """The arrays of a row and the rows of the pool that its features go to, both with an axis of one row."""

    arrays: Mapping[str, np.ndarray]
    rows: Int[np.ndarray, "1 features"]


@dataclass(frozen=True)
class ImageRows:
    """Packs images.

    Attributes:
        layout: see `RowLayout`.
        longest: patches of the longest row; an image with more gets a row of its own, whose length is compiled then.
    """

    layout: RowLayout
    longest: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the patches that a row may have, ascending: ten numbers at most."""
        unit, part = self._unit, self._part
        small = (-(-part // (by * unit)) * unit for by in SMALL)
        longest = EIGHTHS * part if self.layout.unit is None else self.longest
        return tuple(sorted({*small, *range(part, longest + part, part)}))

    @property
    def _unit(self) -> int:
        return self.layout.unit or self.layout.merge

    @property
    def _part(self) -> int:
        return -(-self.longest // (EIGHTHS * self._unit)) * self._unit

    def tokens_up_to(self, most: int) -> tuple[int, ...]:
        """Return the features of each length, ascending, up to the first that so many fit into."""
        features = tuple(length // self.layout.merge for length in self.lengths)
        return features[: sum(number < most for number in features) + 1]

    def lengths_up_to(self, patches: float) -> tuple[int, ...]:
        """Return the lengths of rows that have room for no more patches than these need."""
        return self.lengths[: sum(length < patches for length in self.lengths) + 1]

    def lengths_above(self, patches: float) -> tuple[int, ...]:
        """Return the lengths of rows that an image of more patches than these may take."""
        return tuple(length for length in self.lengths if length > patches)

    def length(self, patches: int) -> int:
        """Return the shortest row that so many patches fit into."""
        part = self._part
        return next((length for length in self.lengths if length >= patches), -(-patches // part) * part)

    def packed(self, items: Sequence[Item], *, together: bool) -> list[list[Item]]:
        """Return the images of each row, in order.

        Args:
            together: False puts each into a row of its own.
        """
        rows: list[list[Item]] = []
        for item in items:
            if rows and together and self._fits([*rows[-1], item]):
                rows[-1].append(item)
            else:
                rows.append([item])
        return rows

    def _fits(self, items: Sequence[Item]) -> bool:
        patches = sum(map(self._patches, items))
        alike = all(
            np.array_equal(item.arrays[array.name], items[0].arrays[array.name])
            for array in self.layout.constants
            for item in items[1:]
        )
        return (
            alike
            and patches <= self.lengths[-1]
            and all(
                sum(len(item.arrays[kind.name]) for item in items) <= kind.places(self.length(patches))
                for kind in self.layout.segments
            )
        )

    def patches(self, arrays: Mapping[str, np.ndarray]) -> int:
        """Return how many patches an image has."""
        return len(arrays[self.layout.patches[0].name])

    def _patches(self, item: Item) -> int:
        return self.patches(item.arrays)

    def joined(
        self, each: Sequence[Sequence[Item]], nowhere: Callable[[int], Int[np.ndarray, " features"]]
    ) -> list[Row]:
        """Return the rows of all replicas, of one length, from the images of each one's.

        Args:
            nowhere: returns rows of the pool that no feature goes to, at least so many.

        Raises:
            ValueError: an image has more segments than a row has places for.
        """
        length = self.joined_length(each)
        example = next(items[0].arrays for items in each if items)
        return [self._row(items, length, example, nowhere(self.layout.num_features(length))) for items in each]

    def joined_length(self, each: Sequence[Sequence[Item]]) -> int:
        """Return the length of the rows that `joined` returns."""
        return self.length(max(sum(map(self._patches, items)) for items in each))

    def _row(
        self, items: Sequence[Item], length: int, example: Mapping[str, np.ndarray], rows: Int[np.ndarray, " features"]
    ) -> Row:
        constant = items[0].arrays if items else example  # those of an image of the row, if it has any
        arrays = {array.name: np.asarray(constant[array.name], array.dtype)[None] for array in self.layout.constants}
        for array in self.layout.patches:
            arrays[array.name] = _side_by_side(array, items, length)
        for array in self.layout.features:
            arrays[array.name] = _side_by_side(array, items, self.layout.num_features(length))
            if array.numbers_patches:
                starts = np.cumsum([0, *map(self._patches, items)])[: len(items)]
                added = np.repeat(starts, [len(item.arrays[array.name]) for item in items])
                own = arrays[array.name][0, : len(added)]
                own += np.where(own < 0, 0, added.reshape(-1, *(1,) * (own.ndim - 1))).astype(own.dtype)
        for kind in self.layout.segments:
            lengths = np.concatenate([np.zeros(1, np.int32), *(item.arrays[kind.name] for item in items)])
            starts, places = np.cumsum(lengths, dtype=np.int32), kind.places(length)
            if len(lengths) - 1 > places:
                raise ValueError(f"an image has {len(lengths) - 1} {kind.name}, a row of {length} patches {places}")
            arrays[kind.name] = np.pad(starts, (0, places + 1 - len(starts)), mode="edge")[None]
        return Row(arrays, rows_of(items, rows))

    def examples(self) -> list[tuple[Mapping[str, np.ndarray], int]]:
        """Return an image that fills a row, and the number of its features, for each length."""
        return [(self._blank(length), self.layout.num_features(length)) for length in self.lengths]

    def _blank(self, length: int) -> dict[str, np.ndarray]:
        arrays = {array.name: np.zeros((length, *array.shape), array.dtype) for array in self.layout.patches}
        arrays |= {array.name: np.zeros(array.shape, array.dtype) for array in self.layout.constants}
        features = self.layout.num_features(length)
        arrays |= {array.name: np.zeros((features, *array.shape), array.dtype) for array in self.layout.features}
        return arrays | {kind.name: np.full(1, length, np.int32) for kind in self.layout.segments}


def rows_of(items: Sequence[Item], rows: Int[np.ndarray, " features"]) -> Int[np.ndarray, "1 features"]:
    """Return the rows of the pool that the features of a row of images go to, with an axis of one row: those of the
    images, then the last of `rows`, to as many as these are."""
    number = sum(len(item.rows) for item in items)
    return np.concatenate([*(item.rows for item in items), rows[number:]], dtype=rows.dtype)[None]


def _side_by_side(array: RowArray, items: Sequence[Item], length: int) -> np.ndarray:
    """Return the items' arrays of this name one after another, and zeros up to `length`, with an axis of one row."""
    whole, first = np.zeros((1, length, *array.shape), array.dtype), 0
    for item in items:
        own = item.arrays[array.name]
        whole[0, first : first + len(own)] = own
        first += len(own)
    return whole


def image_rows(model: Any, most_features: int | None, *, max_model_len: int, budget: int) -> ImageRows | None:
    """Return what packs the images of a model; None where its encoder takes them one by one.

    The longest row holds the largest image that a prompt may have, or as many of that size as a step encodes, as far as
    more patches make a device faster.

    Args:
        most_features: of the largest image; None = it is not known.
        max_model_len: most tokens of a prompt, and so features of an image.
        budget: most features that a step encodes.
    """
    if not isinstance(model, PacksImages):
        return None
    layout: RowLayout = model.row_layout
    if layout.largest is not None:
        return ImageRows(layout, layout.largest * layout.together)
    one = max_model_len if most_features is None else min(most_features, max_model_len)
    together = max(1, min(budget // one, ENOUGH // (one * layout.merge)))
    return ImageRows(layout, one * together * layout.merge)


def image_examples(model: Any, rows: ImageRows | None) -> tuple[tuple[Mapping[str, np.ndarray], int], ...]:
    """Return the images that the encoder is compiled for before one comes, see `jpaged.model_api.TakesImages`."""
    found: Iterable[tuple[Mapping[str, np.ndarray], int]] = ()
    if rows is not None:
        found = rows.examples()
    elif isinstance(model, TakesImages):
        found = model.examples()
    return tuple(found)
