"""Cuts pictures into the patches that LFM2-VL's tower takes (Liquid AI, 2025).

A small picture keeps its shape; a large one is cut into tiles, which a small one of the whole follows, each after a
token that names it. transformers' processor resizes by torchvision; here Pillow does, and the tower scales bytes.
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

from jpaged.images.frames import MOST_OBLONG
from jpaged.images.internvl import grid_of, tiles_of
from jpaged.images.pixels import Picture, resized
from jpaged.images.pixtral import patches_of
from jpaged.images.processors import ImageProcessor, PreparedImage, placeholder_of, processor_file, token_named
from jpaged.images.prompts import Expansion, Placeholder
from jpaged.images.qwen import OF_CLIP, affine, places_of, processor_fields
from jpaged.processor_settings import replaced

_BILINEAR = 2
_DEFAULTS: Mapping[str, Any] = {
    "do_image_splitting": True,
    "do_normalize": True,
    "do_rescale": True,
    "downsample_factor": 2,
    "encoder_patch_size": 16,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
    "max_image_tokens": 256,
    "max_pixels_tolerance": 2.0,
    "max_tiles": 10,
    "min_image_tokens": 64,
    "min_tiles": 2,
    "resample": _BILINEAR,
    "rescale_factor": 1 / 255,
    "tile_size": 512,
    "use_thumbnail": True,
}
"""Settings that a request may replace, with transformers' values."""
_WORK = ("tile_size", "min_image_tokens", "min_tiles", "do_image_splitting", "use_thumbnail")
"""Settings besides those with a name of a bound that a request does not raise."""


@cache
def grids(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Return the (columns, rows) of tiles, few tiles first; of as many in the order of transformers, which is that of a
    set."""
    found = [
        (columns, rows)
        for number in range(least, most + 1)
        for columns in range(1, number + 1)
        for rows in range(1, number + 1)
        if least <= columns * rows <= most
    ]
    return tuple(sorted(set(found), key=math.prod))


@dataclass(frozen=True)
class Lfm2Settings:
    """Says how pictures become patches.

    Attributes:
        patch, merge: pixels of a patch's side, and patches of the side of a square that one token stands for.
        least, most: tokens of a picture that is not cut, and of the small one of a large one.
        tile: pixels of a tile's side.
        fewest, many: tiles of a picture that is cut; (1, 1) = none is.
        tolerance: a picture is cut that has so many times the pixels of `most` tokens.
        whole: whether the small one follows the tiles.
        resample: Pillow's number of the filter.
        scale, shift: see `jpaged.images.qwen.affine`.
    """

    patch: int
    merge: int
    least: int
    most: int
    tile: int
    fewest: int
    many: int
    tolerance: float
    whole: bool
    resample: int
    scale: tuple[float, ...]
    shift: tuple[float, ...]

    @classmethod
    def of(cls, fields: Mapping[str, Any], config: Any) -> Lfm2Settings:
        """Read the settings of a checkpoint's file, and compare them with its config.

        Raises:
            ValueError: they contradict each other.
        """
        found = fields["encoder_patch_size"], fields["downsample_factor"]
        known = config.vision_config.patch_size, config.downsample_factor
        if found != known:
            raise ValueError(
                f"the image processor has encoder_patch_size={found[0]} and downsample_factor={found[1]}, and the "
                f"model's config {known[0]} and {known[1]}"
            )
        least, most, tile = (int(fields[name]) for name in ("min_image_tokens", "max_image_tokens", "tile_size"))
        fewest, many = (int(fields[name]) if fields["do_image_splitting"] else 1 for name in ("min_tiles", "max_tiles"))
        if not 0 < least <= most or not 0 < fewest <= many:
            raise ValueError(
                f"min_image_tokens={least} and min_tiles={fewest} must be above 0, and at most max_image_tokens={most} "
                f"and max_tiles={many}"
            )
        if many > 1 and (tile <= 0 or tile % math.prod(found)):
            raise ValueError(f"tile_size={tile} is no multiple of {math.prod(found)}, the pixels of a token's side")
        resample = _BILINEAR if fields["resample"] is None else int(fields["resample"])
        scaling = affine(fields, config.vision_config.num_channels, *OF_CLIP)
        tolerance = float(fields["max_pixels_tolerance"])
        return cls(*found, least, most, tile, fewest, many, tolerance, fields["use_thumbnail"], resample, *scaling)

    @property
    def square(self) -> int:
        """Return the pixels of a token's side."""
        return self.patch * self.merge

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of a picture that is not cut, or of the small one of a large one.

        Raises:
            ValueError: it is so oblong that it has more than `most_whole` tokens.
        """
        square = self.square
        least, most = (tokens * square**2 for tokens in (self.least, self.most))
        rows, columns = (max(1, round(side / square)) * square for side in (height, width))
        if rows * columns > most:
            shrink = math.sqrt(height * width / most)
            rows, columns = (max(square, math.floor(side / shrink / square) * square) for side in (height, width))
        elif rows * columns < least:
            grow = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(side * grow / square) * square for side in (height, width))
        if (tokens := rows * columns // square**2) > self.most_whole:
            raise ValueError(
                f"{width} x {height} pixels are too oblong: they make {tokens} tokens, the limit is {self.most_whole}"
            )
        return rows, columns

    @property
    def most_whole(self) -> int:
        """Return the most tokens of a picture that is not cut. A very narrow one has more than `most`, as its short
        side is at least one token; more than twice as many are refused."""
        narrow = math.sqrt(self.least * MOST_OBLONG) + math.sqrt(self.least / MOST_OBLONG)
        return max(2 * self.most, int(self.least + narrow + 1))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the (columns, rows) of tiles of a picture; (1, 1) = it is not cut."""
        if self.many == 1:
            return 1, 1
        rows, columns = (max(self.patch, round(side / self.square) * self.square) for side in (height, width))
        if rows * columns <= self.most * self.square**2 * self.tolerance:
            return 1, 1
        return grid_of((height, width), self.tile, grids(self.fewest, self.many))

    def parts(self, size: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the height and width of each part of a picture: of its tiles row by row, and of the whole."""
        columns, rows = self.grid(*size)
        if columns * rows == 1:
            return [self.resized(*size)]
        return [(self.tile, self.tile)] * (columns * rows) + [self.resized(*size)] * self.whole

    def cut(self, pixels: UInt8[np.ndarray, "height width 3"]) -> list[UInt8[np.ndarray, "rows columns 3"]]:
        """Return the parts of a picture."""
        (height, width), (columns, rows) = pixels.shape[:2], self.grid(*pixels.shape[:2])
        whole = []
        if self.whole or columns * rows == 1:
            whole = [resized(pixels, self.resized(height, width), self.resample)]
        return [*(tiles_of(pixels, self.tile, columns, rows, self.resample) if columns * rows > 1 else []), *whole]


@dataclass(frozen=True)
class Marks:
    """The texts between a picture's tokens; () = there are none.

    Attributes:
        around: that begin and end a picture.
        whole: that begins the small picture of the whole.
    """

    around: tuple[str, ...]
    whole: str

    @classmethod
    def of(cls, fields: Mapping[str, Any], tokenizer: Any) -> Marks:
        """Return those of a checkpoint's tokenizer and processor file.

        Raises:
            ValueError: there is no tokenizer, or it does not know them.
        """
        if not fields.get("use_image_special_tokens", True):
            return cls((), "")
        begin, end, whole = (
            token_named(tokenizer, f"image_{name}_token", usual)[1]
            for name, usual in (
                ("start", "<|image_start|>"),
                ("end", "<|image_end|>"),
                ("thumbnail", "<|img_thumbnail|>"),
            )
        )
        return cls((begin, end), whole)

    def before_tiles(self, columns: int, rows: int) -> list[str]:
        """Return the text before each tile."""
        numbers = [(row, column) for row in range(1, rows + 1) for column in range(1, columns + 1)]
        return [f"<|img_row_{row}_col_{column}|>" if self.around else "" for row, column in numbers]


class Lfm2ImageProcessor(ImageProcessor):
    """LFM2-VL.

    Arrays, for each patch, square by square: pixels [patches, channels * patch * patch], and places [patches, 4], its
    row and column, and the rows and columns that there are. For each part of a picture: parts, the number of its
    patches. For all: scale and shift [channels].
    """

    def __init__(
        self, fields: Mapping[str, Any], config: Any, placeholder: Placeholder, marks: Marks, tokenizer: Any
    ) -> None:
        self._fields = {**_DEFAULTS, **{name: fields[name] for name in _DEFAULTS if name in fields}}
        self.settings = Lfm2Settings.of(self._fields, config)
        super().__init__(placeholder, {"family": config.model_type, "settings": asdict(self.settings)})
        self._config, self._marks, self._tokenizer = config, marks, tokenizer

    @classmethod
    def open(cls, folder: str | os.PathLike[str], config: Any, tokenizer: Any) -> ImageProcessor:
        marks = Marks.of(processor_file(folder), tokenizer)
        return cls(processor_fields(folder), config, placeholder_of(config, tokenizer), marks, tokenizer)

    def with_settings(self, settings: Mapping[str, Any], *, of_request: bool) -> ImageProcessor:
        if not settings:
            return self
        found = replaced(self._fields, settings, of_request=of_request)
        raised = [name for name in _WORK if of_request and found[name] > self._fields[name]]
        if raised:
            raise ValueError(
                f"mm_processor_kwargs has {raised[0]}={found[raised[0]]!r}: a request may lower it, which is "
                f"{self._fields[raised[0]]!r}, not raise it"
            )
        try:
            return type(self)(found, self._config, self.placeholder, self._marks, self._tokenizer)
        except ValueError as error:
            raise ValueError(f"mm_processor_kwargs={dict(settings)!r}: {error}") from error

    @property
    def most_features(self) -> int | None:
        settings = self.settings
        tiles = settings.many * (settings.tile // settings.square) ** 2 if settings.many > 1 else 0
        return max(tiles + settings.most_whole * bool(settings.whole), settings.most_whole)

    def _counts(self, size: tuple[int, int]) -> list[int]:
        square = self.settings.square
        return [height // square * (width // square) for height, width in self.settings.parts(size)]

    def tokens(self, size: tuple[int, int], *, alone: bool) -> int:
        return sum(self._counts(size))

    def expansion(self, size: tuple[int, int], *, alone: bool) -> Expansion:
        columns, rows = self.settings.grid(*size)
        before = [""] if columns * rows == 1 else [*self._marks.before_tiles(columns, rows), self._marks.whole]
        begin, end = self._marks.around or ("", "")
        text, ids = begin, self._ids(begin)
        for mark, count in zip(before, self._counts(size), strict=False):
            text += mark + self.placeholder.image_text * count
            ids += [*self._ids(mark), *[self.placeholder.image_token] * count]
        return Expansion(text + end, (*ids, *self._ids(end)))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []

    def prepare(self, picture: Picture, *, alone: bool) -> PreparedImage:
        patch, merge = self.settings.patch, self.settings.merge
        parts = self.settings.cut(picture.pixels)
        places = [places_of((1, len(part) // patch, part.shape[1] // patch), merge) for part in parts]
        arrays = {
            "pixels": np.concatenate([patches_of(part, patch, merge) for part in parts]),
            "places": np.concatenate(places),
            "parts": np.array([len(each) for each in places], np.int32),
            "scale": np.asarray(self.settings.scale, np.float32),
            "shift": np.asarray(self.settings.shift, np.float32),
        }
        ids, token = self.expansion(picture.size, alone=alone).ids, self.placeholder.image_token
        run = np.array(ids[ids.index(token) : len(ids) - ids[::-1].index(token)]) == token
        takes = np.where(run, np.cumsum(run) - 1, -1).astype(np.int32)
        return PreparedImage(arrays, int(run.sum()), takes)
