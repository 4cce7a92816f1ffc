"""Features of images that a caller has encoded: what is checked of them, and where a model puts their tokens."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

GIVEN_FEATURES = "image_embeds"
"""Name of the features in a prompt's ``multi_modal_data`` (vLLM's), and among an item's arrays."""

_GRIDS = "image_grid_thw"
_LEAST = 256
"""Places for features that an array has at least; their number is a power of two, so that few shapes are compiled."""

Grid = tuple[int, int, int]
"""Patches of an image in time, height and width, before they are merged."""


@dataclass(frozen=True, eq=False)
class GivenImage:
    """An image as the caller's encoder left it.

    Attributes:
        features: a vector for each of its tokens, row by row.
        grid: its patches; None where the model needs none.
    """

    features: Float[np.ndarray, "features width"]
    grid: Grid | None

    @property
    def digest(self) -> bytes:
        """Return 32 bytes that are equal for equal features on an equal grid."""
        state = hashlib.blake2b(digest_size=32, person=b"jpaged-given")
        state.update(repr((self.grid, self.features.shape)).encode())
        state.update(np.ascontiguousarray(self.features).tobytes())
        return state.digest()

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Return what the device is given: the features, and zeros up to one of few sizes."""
        places = max(_LEAST, 1 << (len(self.features) - 1).bit_length())
        return {GIVEN_FEATURES: np.pad(self.features, ((0, places - len(self.features)), (0, 0)))}


@dataclass(frozen=True)
class GivenLayout:
    """How a model places the tokens of images by their grids (M-RoPE; Qwen2-VL, Wang et al., 2024, section 2.1).

    Attributes:
        width: numbers of a feature: those of a hidden state, times the levels that the model reads.
        merge: patches on each side of a square that one token stands for. None = tokens follow one another like text,
            and images come without grids.
        in_rows: whether tokens follow one another like text, and the model's image processor says what ends a row of
            them (Pixtral); else they lie at their rows and columns.
    """

    width: int
    merge: int | None
    in_rows: bool = False

    def tokens(self, grid: Grid) -> int:
        """Return how many tokens an image takes."""
        time, (height, width) = grid[0], self.merged(grid)
        return time * height * width

    def offsets(self, grid: Grid | None) -> Int[np.ndarray, "tokens 3"] | None:
        """Return where each token lies in time, height and width, from where the image begins; None = like text."""
        if self.in_rows or grid is None:
            return None
        return np.indices((grid[0], *self.merged(grid)), np.int32).reshape(3, -1).T

    def advance(self, grid: Grid | None) -> int | None:
        """Return how far an image moves the position of the token after it: by its longer side; None = like text."""
        return None if self.in_rows or grid is None else max(self.merged(grid))

    def merged(self, grid: Grid) -> tuple[int, int]:
        """Return the tokens of a grid's height and width."""
        assert self.merge is not None, "a grid of a model that has none"
        return grid[1] // self.merge, grid[2] // self.merge

    def read(self, data: Mapping[str, Any]) -> list[GivenImage]:
        """Return the images of a mapping with the features of all, one after the other, and the grid of each.

        Args:
            data: ``image_embeds`` [features, width], float numbers; ``image_grid_thw`` [images, 3], or [3] for one.
                Each may be a ``.npy`` file in base64. Without grids, ``image_embeds`` has the features of one image, or
                is [images, features, width], or a list with an array of each image.

        Raises:
            ValueError: something is missing or of another shape, a grid is no multiple of the squares that are merged,
                there are more or fewer features than the grids have tokens, or a number is not finite.
        """
        if self.merge is None:
            return self._read_runs(data)
        if unknown := sorted(map(str, set(data) - {GIVEN_FEATURES, _GRIDS})):
            raise ValueError(f"given features have {GIVEN_FEATURES!r} and {_GRIDS!r}, not {', '.join(unknown)}")
        if missing := [name for name in (GIVEN_FEATURES, _GRIDS) if data.get(name) is None]:
            raise ValueError(f"given features lack {' and '.join(map(repr, missing))}")
        features = _numbers(data[GIVEN_FEATURES])
        where = data[_GRIDS]
        where = array_in(_GRIDS, where) if isinstance(where, str) else np.asarray(where)
        grids = [self._checked(grid) for grid in np.atleast_2d(where).tolist()]
        if features.ndim != 2 or features.shape[1] != self.width:
            raise ValueError(f"{GIVEN_FEATURES} of shape {list(features.shape)} must be [features, {self.width}]")
        counts = [self.tokens(grid) for grid in grids]
        if sum(counts) != len(features):
            raise ValueError(
                f"{GIVEN_FEATURES} has {len(features)} features, and {_GRIDS}={list(map(list, grids))} takes "
                f"{sum(counts)}: merged {self.merge} x {self.merge}"
            )
        ends = np.cumsum(counts)
        return [
            GivenImage(features[end - count : end], grid)
            for grid, count, end in zip(grids, counts, ends.tolist(), strict=True)
        ]

    def _read_runs(self, data: Mapping[str, Any]) -> list[GivenImage]:
        if set(data) != {GIVEN_FEATURES} or data[GIVEN_FEATURES] is None:
            raise ValueError(f"given features have {GIVEN_FEATURES!r} alone, not {', '.join(sorted(map(str, data)))}")
        given = data[GIVEN_FEATURES]
        arrays = [_numbers(each) for each in given] if _lists_images(given) else _numbers(given)
        if isinstance(arrays, np.ndarray) and arrays.ndim != 3:
            arrays = arrays[None]
        if not len(arrays):
            raise ValueError(f"{GIVEN_FEATURES} is empty: give the features of an image, or leave it out")
        for number, features in enumerate(arrays, start=1):
            if features.ndim != 2 or features.shape[1] != self.width or not len(features):
                raise ValueError(
                    f"image {number} of {len(arrays)}: {GIVEN_FEATURES} of shape {list(features.shape)} must be "
                    f"[features, {self.width}], with one feature or more"
                )
        return [GivenImage(features, None) for features in arrays]

    def _checked(self, grid: Sequence[Any]) -> Grid:
        merge = self.merge
        assert merge is not None
        whole = len(grid) == 3 and all(isinstance(side, int) and side > 0 for side in grid)
        if whole and self.in_rows and grid[0] != 1:
            raise ValueError(f"{_GRIDS} has {list(grid)}: the model takes images, of 1 patch in time, and no videos")
        if not whole or grid[1] % merge or grid[2] % merge:
            raise ValueError(
                f"{_GRIDS} has {list(grid)}: each image has patches in time, height and width, the last two multiples "
                f"of {merge}"
            )
        return grid[0], grid[1], grid[2]


def _lists_images(given: Any) -> bool:
    """Tell whether images are listed: by files in base64, arrays or lists of features, not by features' numbers."""
    return isinstance(given, list | tuple) and all(isinstance(each, str) or _dimensions(each) == 2 for each in given)


def _dimensions(given: Any) -> int:
    if isinstance(given, list | tuple):
        return 1 + (_dimensions(given[0]) if len(given) else 0)
    return getattr(given, "ndim", 0)


def is_given(images: Any) -> bool:
    """Tell whether a prompt's images are features that the caller has encoded."""
    return isinstance(images, Mapping)


def array_in(name: str, text: str) -> np.ndarray:
    """Return the array of a ``.npy`` file in base64, as a request over HTTP gives it.

    Raises:
        ValueError: it is none, has objects in place of numbers, or has not the bytes that its header states.
    """
    try:
        data = base64.b64decode(text, validate=True)
        file = io.BytesIO(data)
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(file)
    # Python raises the last two for a header that nests too deeply.
    except (binascii.Error, ValueError, KeyError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(
            f"{name} is no array of numbers, as a .npy file in base64: {str(error) or type(error).__name__}"
        ) from error
    if dtype.kind not in "fiu":
        raise ValueError(f"{name} has the dtype {dtype}, which is none of numbers")
    if math.prod(shape) * dtype.itemsize != len(data) - file.tell():
        raise ValueError(f"{name} of shape {list(shape)} has {len(data) - file.tell()} bytes after its header")
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")


def _numbers(given: Any) -> np.ndarray:
    if isinstance(given, str):
        given = array_in(GIVEN_FEATURES, given)
    if hasattr(given, "detach"):  # a tensor of torch, which NumPy cannot read in bfloat16
        given = given.detach().cpu().float()
    try:
        features = np.asarray(given, np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{GIVEN_FEATURES} is no array of numbers: {error}") from error
    if not np.isfinite(features).all():
        raise ValueError(f"{GIVEN_FEATURES} has {int((~np.isfinite(features)).sum())} numbers that are not finite")
    return features
