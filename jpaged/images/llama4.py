"""Cuts pictures into the tiles that Llama 4's tower takes (Meta, 2025).

A picture is laid into the corner of the smallest grid of tiles that holds it, and a small one of the whole follows the
tiles. transformers' processor resizes by torchvision; here Pillow does, and the tower scales bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from jaxtyping import UInt8

from jpaged.images.internvl import prepared_tiles
from jpaged.images.pixels import Picture, resized
from jpaged.images.processors import ImageProcessor, PreparedImage, processor_file, token_named
from jpaged.images.prompts import Expansion, Placeholder
from jpaged.images.qwen import affine, processor_fields
from jpaged.processor_settings import replaced

_BILINEAR = 2
_DEFAULTS: Mapping[str, Any] = {
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
    "max_patches": 16,
    "resample": _BILINEAR,
    "rescale_factor": 1 / 255,
    "resize_to_max_canvas": False,
    "size": {"height": 336, "width": 336},
}
"""Settings that a request may replace, with transformers' values."""
_MARKS = ("image_start", "patch", "tile_x_separator", "tile_y_separator", "image", "image_end")


@cache
def grids(most: int) -> tuple[tuple[int, int], ...]:
    """Return the (rows, columns) of tiles that a picture may be laid into, by shape, those of many tiles first."""
    by_shape: dict[float, list[tuple[int, int]]] = {}
    for number in range(most, 0, -1):
        for rows in (each for each in range(1, number + 1) if number % each == 0):
            by_shape.setdefault(rows / (number // rows), []).append((rows, number // rows))
    return tuple(grid for alike in by_shape.values() for grid in alike)


@dataclass(frozen=True)
class Llama4Settings:
    """Says how pictures become tiles.

    Attributes:
        tile, patch, merge: pixels of a tile's side and of a patch's, and patches of the side of a square that one token
            stands for.
        most: tiles of a picture, without that of the whole.
        grows: whether a small picture is enlarged to its grid; else to a tile's side.
        resample: Pillow's number of the filter.
        factor, mean, std: bytes are multiplied by `factor`, less `mean`, divided by `std`.
    """

    tile: int
    patch: int
    merge: int
    most: int
    grows: bool
    resample: int
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, fields: Mapping[str, Any], config: Any) -> Llama4Settings:
        """Read the settings of a checkpoint's file, and compare them with its config.

        Raises:
            ValueError: they contradict each other, or one is not supported.
        """
        vision, size = config.vision_config, fields["size"]
        if (size.get("height"), size.get("width")) != (vision.image_size, vision.image_size):
            raise ValueError(
                f"the image processor's size={dict(size)} is not image_size={vision.image_size} of the tower"
            )
        if (tiles := int(fields["max_patches"])) < 1:
            raise ValueError(f"max_patches={tiles} must be above 0: a picture is at least one tile")
        mean, std, channels = tuple(fields["image_mean"]), tuple(fields["image_std"]), vision.num_channels
        affine(fields, channels, mean, std)  # for its checks: the tower scales in bfloat16, step by step
        return cls(
            vision.image_size,
            vision.patch_size,
            round(1 / vision.pixel_shuffle_ratio),
            tiles,
            bool(fields["resize_to_max_canvas"]),
            _BILINEAR if fields["resample"] is None else int(fields["resample"]),
            float(fields["rescale_factor"]),
            mean,
            std,
        )

    @property
    def tokens(self) -> int:
        """Return the tokens of a tile."""
        return (self.tile // (self.patch * self.merge)) ** 2

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the (rows, columns) of tiles of a picture of (height, width) pixels.

        It is the one that enlarges least; or, where all shrink it, the one that shrinks least. All is computed in
        float32, as torch does it, which decides between equals.
        """
        choice = np.array(grids(self.most))
        scales = (choice * self.tile).astype(np.float32) / np.array(size, np.float32)
        each = scales.min(axis=1)
        larger = each[each >= 1]
        chosen = each[each < 1].max() if not len(larger) else larger.max() if self.grows else larger.min()
        found = choice[each == chosen]
        rows, columns = found[found.prod(axis=1).argmin()].tolist()
        return rows, columns

    def within(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the (height, width) that a picture has in its grid."""
        (rows, columns), (height, width) = self.grid(size), size
        # torch has the sides of a grid as float32, and others as Python's numbers.
        high, wide = (
            np.float32(canvas) if self.grows or canvas < max(side, self.tile) else max(side, self.tile)
            for canvas, side in ((rows * self.tile, height), (columns * self.tile, width))
        )
        down, across = high / height, wide / width
        if across < down:
            height, width = min(math.floor(height * across), int(high)), int(wide)
        else:
            height, width = int(high), min(math.floor(width * down), int(wide))
        return max(height, 1), max(width, 1)

    def tiles(self, pixels: UInt8[np.ndarray, "height width 3"]) -> UInt8[np.ndarray, "tiles side side 3"]:
        """Return the tiles of a picture, row by row, and then the one of the whole."""
        size, side = pixels.shape[:2], self.tile
        rows, columns = self.grid(size)
        inner = resized(pixels, self.within(size), self.resample)
        canvas = np.zeros((rows * side, columns * side, 3), np.uint8)
        canvas[: inner.shape[0], : inner.shape[1]] = inner
        cut = canvas.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4).reshape(-1, side, side, 3)
        if len(cut) == 1:
            return cut
        return np.concatenate([cut, resized(pixels, (side, side), self.resample)[None]])


class Llama4ImageProcessor(ImageProcessor):
    """Llama 4.

    Arrays: see `jpaged.images.internvl.InternVLImageProcessor`, except that factor [1], mean and std [channels] are in
    the place of scale and shift.
    """

    def __init__(self, fields: Mapping[str, Any], config: Any, marks: Mapping[str, tuple[int, str]]):
        for name in ("do_resize", "do_rescale", "do_normalize"):
            if fields.get(name) is False:
                raise ValueError(f"an image processor with {name}=False is not supported")
        self._fields = {**_DEFAULTS, **{name: fields[name] for name in _DEFAULTS if name in fields}}
        self.settings = Llama4Settings.of(self._fields, config)
        (token, text), (image, image_text) = marks["image"], marks["patch"]
        placeholder = Placeholder(token, text, config.image_token_id, image_text)
        if image != config.image_token_id:
            raise ValueError(
                f"image_token_index={config.image_token_id}, and the tokenizer has {image_text!r} as {image}"
            )
        super().__init__(placeholder, {"family": config.model_type, "settings": asdict(self.settings)})
        self._config, self._marks = config, marks

    @classmethod
    def open(cls, folder: str | os.PathLike[str], config: Any, tokenizer: Any) -> ImageProcessor:
        whole = processor_file(folder)
        names = {"image_start": "start_of_image_token", "image_end": "end_of_image_token"}
        marks = {
            each: token_named(tokenizer, f"{each}_token", whole.get(names.get(each, f"{each}_token"), f"<|{each}|>"))
            for each in _MARKS
        }
        return cls(processor_fields(folder), config, marks)

    def with_settings(self, settings: Mapping[str, Any], *, of_request: bool) -> ImageProcessor:
        if not settings:
            return self
        found = replaced(self._fields, settings, of_request=of_request)
        if of_request and found["resize_to_max_canvas"] and not self.settings.grows:
            raise ValueError(
                "mm_processor_kwargs has resize_to_max_canvas=True, which makes more tiles of a small picture: an "
                "engine may have it, a request may not"
            )
        try:
            return type(self)(found, self._config, self._marks)
        except ValueError as error:
            raise ValueError(f"mm_processor_kwargs={dict(settings)!r}: {error}") from error

    @property
    def most_features(self) -> int | None:
        """Return how many vectors the language model gets of the largest image."""
        return (self.settings.most + (self.settings.most > 1)) * (self.settings.tokens + 1)

    def tokens(self, size: tuple[int, int], *, alone: bool) -> int:
        tiles = math.prod(self.settings.grid(size))
        return (tiles + (tiles > 1)) * self.settings.tokens

    def expansion(self, size: tuple[int, int], *, alone: bool) -> Expansion:
        rows, columns = self.settings.grid(size)
        tile = ["patch"] * self.settings.tokens
        row = [*[*tile, "tile_x_separator"] * (columns - 1), *tile, "tile_y_separator"]
        names = ["image_start", *(row * rows if rows * columns > 1 else []), "image", *tile, "image_end"]
        found = [self._marks[name] for name in names]
        return Expansion("".join(text for _, text in found), tuple(token for token, _ in found))

    def prepare(self, picture: Picture, *, alone: bool) -> PreparedImage:
        settings = self.settings
        constants = {
            "factor": np.array([settings.factor], np.float32),
            "mean": np.asarray(settings.mean, np.float32),
            "std": np.asarray(settings.std, np.float32),
        }
        made = prepared_tiles(settings.tiles(picture.pixels), settings.patch, settings.merge, constants)
        ids, token = self.expansion(picture.size, alone=alone).ids, self.placeholder.image_token
        run = np.array(ids[ids.index(token) : len(ids) - ids[::-1].index(token)]) == token
        takes = np.full(len(run), -1, np.int32)
        takes[run] = np.arange(made.features) if made.takes is None else made.takes
        return PreparedImage(made.arrays, made.features, takes)
