"""Reads the arrays of an Orbax checkpoint without Orbax: uncompressed Zarr, a file for each device's part."""

from __future__ import annotations

import itertools
import json
import math
import mmap as system
from collections.abc import Iterator
from mmap import MAP_SHARED, PROT_READ, mmap
from pathlib import Path

import jax.numpy as jnp
import numpy as np

_READ_NOW = getattr(system, "MAP_POPULATE", 0)
"""Flag that reads the file when it is mapped, not at each page's first use; Linux only."""


class ZarrArray:
    """Reads a Zarr array (version 2) of raw chunks: a folder with ``.zarray`` and a file a chunk, ``2.0`` and the like.

    Slices with step 1, one for each axis, read only their own part; a slice within one chunk is a view of its
    memory-mapped file, which stays mapped as long as the array.

    Attributes:
        shape, dtype: shape and dtype of the whole array.

    Raises:
        ValueError: there is no such folder, or its array is compressed, filtered or in another order.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        try:
            about = json.loads((folder / ".zarray").read_text())
        except FileNotFoundError as error:
            raise ValueError(f"{folder.parent} has no array {folder.name}") from error
        form = {key: about[key] for key in ("zarr_format", "compressor", "filters", "order")}
        if form != {"zarr_format": 2, "compressor": None, "filters": None, "order": "C"}:
            raise ValueError(f"{folder} is no array of raw chunks: {form}")
        self.shape = tuple(about["shape"])
        self.ndim = len(self.shape)
        self.dtype = np.dtype(jnp.dtype(about["dtype"]))
        self._chunk = tuple(about["chunks"])
        self._separator = about["dimension_separator"]
        self._mapped: dict[tuple[int, ...], np.ndarray] = {}

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        bounds = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
        met = list(self._meet(bounds))
        if len(met) == 1:
            return self._view(*met[0])
        whole = np.empty([stop - start for start, stop in bounds], self.dtype)
        for number, own in met:
            begins = [n * size + part.start for n, size, part in zip(number, self._chunk, own, strict=True)]
            place = [
                slice(begin - start, begin - start + part.stop - part.start)
                for begin, (start, _), part in zip(begins, bounds, own, strict=True)
            ]
            whole[tuple(place)] = self._view(number, own)
        return whole

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[(slice(None),) * self.ndim], dtype, copy=bool(copy))

    def _meet(self, bounds: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Yield the chunks that meet these bounds, each with its part of them."""
        axes = []
        for (start, stop), size in zip(bounds, self._chunk, strict=True):
            numbers = range(start // size, -(-stop // size))
            axes.append([(n, slice(max(start - n * size, 0), min(stop - n * size, size))) for n in numbers])
        for met in itertools.product(*axes):
            yield tuple(n for n, _ in met), tuple(part for _, part in met)

    def _view(self, number: tuple[int, ...], part: tuple[slice, ...]) -> np.ndarray:
        if number in self._mapped:  # a matrix is put in order some columns at a time
            return self._mapped[number][part]
        file = self._folder / self._separator.join(map(str, number))
        wanted = math.prod(self._chunk) * self.dtype.itemsize
        if not file.exists() or file.stat().st_size != wanted:
            raise ValueError(f"{self._folder.parent} is damaged: {self._folder.name}/{file.name} is not {wanted} bytes")
        with file.open("rb") as stream:
            mapped = mmap(stream.fileno(), wanted, flags=MAP_SHARED | _READ_NOW, prot=PROT_READ)
        self._mapped[number] = np.frombuffer(mapped, self.dtype).reshape(self._chunk)
        return self._mapped[number][part]
