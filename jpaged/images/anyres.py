"""Computes which features of a picture's tiles LLaVA-OneVision shows to its language model, and in which order.

"Anyres" (LLaVA-OneVision, Li et al., 2024, section 3.2): the picture is fitted into one of several grids of tiles,
which are encoded each alone, after an overview of the whole picture. The tiles' features are put together to one map,
the rows or columns of padding are cut off, a map that is too large is shrunk, and each row ends with a learned newline.
All of that is a sum of at most four features for each token, and computed here as such: the device only gathers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int32

NEWLINE = 0
"""The row of the learned newline; the features of the tiles follow it, tile by tile, each row by row."""

_TOLERATED = 1.1
"""A map is shrunk once its side is this many times the side of the largest that is allowed."""


@dataclass(frozen=True)
class Anyres:
    """The shapes a model was trained with.

    Attributes:
        resolutions: the grids that a picture may be fitted into, as (height, width) in pixels.
        tile: height and width of a tile in pixels.
        side: features along each side of a tile.
        most_tiles: a map with more features than this number of tiles is shrunk; None = none is (LLaVA-NeXT).
    """

    resolutions: tuple[tuple[int, int], ...]
    tile: int
    side: int
    most_tiles: int | None


@dataclass(frozen=True)
class _Map:
    """The map of a picture's features: its place in the tiles' grid, and its size before and after shrinking."""

    grid: tuple[int, int]
    top: int
    left: int
    height: int
    width: int
    rows: int
    columns: int


def best_resolution(size: tuple[int, int], resolutions: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the (height, width) that keeps most of the picture's pixels, and of those the one that wastes least."""
    height, width = size

    def worth(resolution: tuple[int, int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=worth)  # the first of equals


def token_count(size: tuple[int, int], shape: Anyres, *, alone: bool) -> int:
    """Return how many tokens a picture of (height, width) pixels takes; see `packing`."""
    if not alone:
        return shape.side**2 + 1
    place = _map_of(size, shape)
    return shape.side**2 + place.rows * (place.columns + 1)


def packing(
    size: tuple[int, int], shape: Anyres, *, alone: bool
) -> tuple[Int32[np.ndarray, "tokens 4"], Float32[np.ndarray, "tokens 4"]]:
    """Return, for each token, the rows that are summed, and their factors.

    Row `NEWLINE` is the newline, row ``1 + tile * side**2 + y * side + x`` a feature of a tile; tile 0 is the overview.

    Args:
        size: height and width of the picture in pixels.
        alone: whether it is the only picture of its prompt. Otherwise there is the overview only, and one newline.
    """
    overview = 1 + np.arange(shape.side**2)
    if not alone:
        return _as_they_are(np.append(overview, NEWLINE))
    place = _map_of(size, shape)
    above, below, down = _taps(place.height, place.rows)
    left, right, across = _taps(place.width, place.columns)
    y = np.stack([above, above, below, below], -1)[:, None] + place.top
    x = np.stack([left, right, left, right], -1)[None] + place.left
    tile = 1 + y // shape.side * place.grid[1] + x // shape.side
    rows = 1 + (tile * shape.side + y % shape.side) * shape.side + x % shape.side
    weights = np.stack([1 - down, 1 - down, down, down], -1)[:, None]
    weights = weights * np.stack([1 - across, across, 1 - across, across], -1)[None]
    line_ends = np.full((place.rows, 1, 4), NEWLINE)
    rows = np.concatenate([rows, line_ends], axis=1).reshape(-1, 4)
    weights = np.concatenate([weights, np.eye(4)[:1].repeat(place.rows, 0)[:, None]], axis=1).reshape(-1, 4)
    first = _as_they_are(overview)
    return (
        np.concatenate([first[0], rows.astype(np.int32)]),
        np.concatenate([first[1], weights.astype(np.float32)]),
    )


def pooling(
    tiles: int, side: int, pooled: int, *, newline: bool
) -> tuple[Int32[np.ndarray, "tokens 4"], Float32[np.ndarray, "tokens 4"]]:
    """Return, as `packing`, the features of a video's frames, each shrunk from `side` to `pooled` features a side.

    Args:
        tiles: number of frames; there is no overview, so that the first one's features begin at row 1.
        newline: whether the newline follows.
    """
    first, second, share = _taps(side, pooled)
    y = np.stack([first, first, second, second], -1)[:, None]
    x = np.stack([first, second, first, second], -1)[None]
    of_tile = (1 + y * side + x).reshape(-1, 4)
    down = np.stack([1 - share, 1 - share, share, share], -1)[:, None]
    weights = (down * np.stack([1 - share, share, 1 - share, share], -1)[None]).reshape(-1, 4)
    rows = (of_tile[None] + np.arange(tiles)[:, None, None] * side**2).reshape(-1, 4)
    weights = np.tile(weights, (tiles, 1))
    if newline:
        end = _as_they_are(np.array([NEWLINE]))
        rows, weights = np.concatenate([rows, end[0]]), np.concatenate([weights, end[1]])
    return rows.astype(np.int32), weights.astype(np.float32)


def _map_of(size: tuple[int, int], shape: Anyres) -> _Map:
    (height, width), side = size, shape.side
    best = best_resolution(size, shape.resolutions)
    grid = best[0] // shape.tile, best[1] // shape.tile
    whole = grid[0] * side, grid[1] * side
    top = left = 0
    if width / height > whole[1] / whole[0]:
        top = (whole[0] - int(round(height * (whole[1] / width), 7))) // 2
    else:
        left = (whole[1] - int(round(width * (whole[0] / height), 7))) // 2
    rows, columns = inside = whole[0] - 2 * top, whole[1] - 2 * left
    ratio = 0.0 if shape.most_tiles is None else math.sqrt(rows * columns / (shape.most_tiles * side**2))
    if ratio > _TOLERATED:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return _Map(grid, top, left, *inside, rows, columns)


def _taps(size: int, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each of `wanted` places its two neighbours among `size`, and the share of the second (bilinear)."""
    centre = np.maximum((np.arange(wanted) + 0.5) * (size / max(wanted, 1)) - 0.5, 0.0)
    first = centre.astype(np.int64)
    return first, np.minimum(first + 1, size - 1), centre - first


def _as_they_are(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the gather that takes these rows alone."""
    weights = np.zeros((len(rows), 4), np.float32)
    weights[:, 0] = 1.0
    return np.repeat(rows[:, None], 4, axis=1).astype(np.int32), weights
