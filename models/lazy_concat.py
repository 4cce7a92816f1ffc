"""Joins arrays along an axis when they are sliced, so that no more of a large tensor is read than is wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Pieces = Sequence["np.ndarray | LazyConcat"]


class LazyConcat:
    """Puts off ``np.concatenate(pieces, axis)``: slices with step 1, one for each axis, read the pieces they meet.

    Pieces are views of the memory-mapped files of a checkpoint, so a process of several reads its own parts only.

    Raises:
        ValueError: pieces differ in another axis.
    """

    def __init__(self, pieces: Pieces, axis: int):
        self.pieces = tuple(pieces)
        first = self.pieces[0]
        self.axis = axis % len(first.shape)
        others = {(*piece.shape[: self.axis], *piece.shape[self.axis + 1 :]) for piece in self.pieces}
        if len(others) > 1:
            shapes = ", ".join(str(piece.shape) for piece in self.pieces)
            raise ValueError(f"arrays of shapes {shapes} cannot be joined along axis {self.axis}")
        size = sum(piece.shape[self.axis] for piece in self.pieces)
        self.shape: tuple[int, ...] = (*first.shape[: self.axis], size, *first.shape[self.axis + 1 :])
        self.dtype: np.dtype = first.dtype
        self.ndim = len(self.shape)

    @property
    def T(self) -> LazyConcat:
        """Return the arrays' transposes joined."""
        return LazyConcat([piece.T for piece in self.pieces], len(self.shape) - 1 - self.axis)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[self.axis].indices(self.shape[self.axis])
        parts = [piece[(*index[: self.axis], own, *index[self.axis + 1 :])] for piece, own in self._meet(start, stop)]
        return np.asarray(parts[0]) if len(parts) == 1 else np.concatenate(parts, self.axis)

    def _meet(self, start: int, stop: int) -> Iterator[tuple[np.ndarray | LazyConcat, slice]]:
        """Yield the pieces between two places along the axis, and which part of each is meant."""
        at = 0
        for piece in self.pieces:
            size = piece.shape[self.axis]
            own = slice(max(start - at, 0), min(stop - at, size))
            if own.start < own.stop:
                yield piece, own
            at += size

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self[tuple(slice(None) for _ in self.shape)]
        return whole.astype(dtype or self.dtype, copy=bool(copy))


def lines(array: np.ndarray, axis: int, start: int, stop: int) -> list[np.ndarray]:
    """Return the pieces that hold ``array`` from `start` to `stop` along `axis`, and zeros beyond its end."""
    size = array.shape[axis]
    found = []
    if start < size:
        view = [slice(None)] * array.ndim
        view[axis] = slice(start, min(stop, size))
        found.append(array[tuple(view)])
    if stop > max(start, size):
        shape = list(array.shape)
        shape[axis] = stop - max(start, size)
        found.append(zeros(tuple(shape), array.dtype))
    return found


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array of zeros that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)
