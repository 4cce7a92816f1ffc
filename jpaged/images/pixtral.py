"""Cuts pictures into the patches that Pixtral's tower takes (Mistral Small 3.1, Ministral 3; Agrawal et al., 2024).

A picture keeps its shape: it is shrunk until its longer side fits, and its sides are rounded up to multiples of a
square that one token stands for. Each row of tokens ends with a token that takes no feature.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Int32, UInt8

from jpaged.images.pixels import Picture, resized
from jpaged.images.processors import ImageProcessor, PreparedImage, placeholder_of, processor_file, token_named
from jpaged.images.prompts import Expansion, Placeholder
from jpaged.images.qwen import OF_CLIP, SCALING, affine, places_of, processor_fields
from jpaged.processor_settings import replaced

_BICUBIC = 3
_DEFAULTS: Mapping[str, Any] = {
    **SCALING,
    "size": {"longest_edge": 1024},
}
"""Settings that a request may replace, with transformers' values."""


@dataclass(frozen=True)
class RowEnds:
    """The tokens that end the rows of a picture, and its last row.

    Attributes:
        row, last: their ids, and their texts.
    """

    row: tuple[int, str]
    last: tuple[int, str]

    @classmethod
    def of(cls, fields: Mapping[str, Any], tokenizer: Any) -> RowEnds:
        """Return those that a checkpoint's processor file names.

        Raises:
            ValueError: there is no tokenizer, or it does not know them.
        """
        usual = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
        row, last = (token_named(tokenizer, name, fields.get(name, text)) for name, text in usual.items())
        return cls(row, last)

    def expansion(self, placeholder: Placeholder, rows: int, columns: int) -> Expansion:
        """Return what takes the place of a picture of so many rows and columns of tokens."""
        text = (placeholder.image_text * columns + self.row[1]) * (rows - 1) + placeholder.image_text * columns
        row = (placeholder.image_token,) * columns
        return Expansion(text + self.last[1], (*((*row, self.row[0]) * (rows - 1)), *row, self.last[0]))


def takes_of_rows(rows: int, columns: int) -> Int32[np.ndarray, " tokens"]:
    """Return which feature each token of a picture takes, from its first to its last: -1 at a row's end."""
    takes = np.full((rows, columns + 1), -1, np.int32)
    takes[:, :-1] = np.arange(rows * columns).reshape(rows, columns)
    return takes.reshape(-1)[:-1]


@dataclass(frozen=True)
class PixtralSettings:
    """Says how pictures become patches.

    Attributes:
        patch, merge: pixels of a patch's side, and patches of the side of a square that one token stands for.
        most: height and width that a picture is shrunk to.
        resample: Pillow's number of the filter.
        resizes: False leaves the size as it is.
        scale, shift: see `jpaged.images.qwen.affine`.
    """

    patch: int
    merge: int
    most: tuple[int, int]
    resample: int
    resizes: bool
    scale: tuple[float, ...]
    shift: tuple[float, ...]

    @classmethod
    def of(cls, fields: Mapping[str, Any], patch: int, merge: int, channels: int) -> PixtralSettings:
        """Read a checkpoint's file.

        Raises:
            ValueError: a bound is missing, or a setting is not supported.
        """
        size = fields["size"]
        size = {"longest_edge": size} if isinstance(size, int) else size
        longest = size.get("longest_edge")
        most: tuple[Any, Any] = (longest, longest) if longest else (size.get("height"), size.get("width"))
        if not all(most):
            raise ValueError(f"the image processor's size={dict(size)} lacks 'longest_edge', or 'height' and 'width'")
        if fields.get("do_center_crop"):
            raise ValueError("an image processor with do_center_crop=True is not supported")
        resample = _BICUBIC if fields["resample"] is None else int(fields["resample"])
        scaling = affine(fields, channels, *OF_CLIP)
        return cls(patch, merge, (int(most[0]), int(most[1])), resample, fields["do_resize"], *scaling)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which a picture is resized.

        Raises:
            ValueError: it is too oblong, or no multiple of a square where nothing is resized.
        """
        square = self.patch * self.merge
        if not self.resizes:
            if height % square or width % square:
                raise ValueError(f"{width} x {height} pixels are no multiples of {square}, and do_resize=False")
            return height, width
        shrink = max(height / self.most[0], width / self.most[1])
        if shrink > 1:
            rows, columns = math.floor(height / shrink), math.floor(width / shrink)
            if not rows or not columns:
                raise ValueError(
                    f"{width} x {height} pixels are too oblong: within {self.most[1]} x {self.most[0]}, less than one "
                    "is left of a side"
                )
            height, width = rows, columns
        return -(-height // square) * square, -(-width // square) * square


class PixtralImageProcessor(ImageProcessor):
    """Pixtral, with or without squares of patches that become one token.

    Arrays, for each patch, square by square: pixels [patches, channels * patch * patch], and places [patches, 4], its
    row and column, and the rows and columns that there are. Once: pictures, the number of patches. For all: scale and
    shift [channels].
    """

    def __init__(self, fields: Mapping[str, Any], config: Any, placeholder: Placeholder, ends: RowEnds):
        vision = config.vision_config
        self._fields = {
            **_DEFAULTS,
            **{name: fields[name] for name in (*_DEFAULTS, "do_center_crop") if name in fields},
        }
        merge = getattr(config, "spatial_merge_size", 1)
        self.settings = PixtralSettings.of(self._fields, vision.patch_size, merge, vision.num_channels)
        super().__init__(placeholder, {"family": config.model_type, "settings": asdict(self.settings)})
        self._config, self._ends = config, ends

    @classmethod
    def open(cls, folder: str | os.PathLike[str], config: Any, tokenizer: Any) -> ImageProcessor:
        fields, whole = processor_fields(folder), processor_file(folder)
        known = config.vision_config.patch_size, getattr(config, "spatial_merge_size", 1)
        found = whole.get("patch_size", known[0]), whole.get("spatial_merge_size", known[1])
        if found != known:
            raise ValueError(
                f"processor_config.json has patch_size={found[0]} and spatial_merge_size={found[1]}, and the model's "
                f"config {known[0]} and {known[1]}"
            )
        return cls(fields, config, placeholder_of(config, tokenizer), RowEnds.of(whole, tokenizer))

    def with_settings(self, settings: Mapping[str, Any], *, of_request: bool) -> ImageProcessor:
        if not settings:
            return self
        found = replaced(self._fields, settings, of_request=of_request)
        if of_request and self.settings.resizes and not found["do_resize"]:
            raise ValueError(
                "mm_processor_kwargs has do_resize=False, with which longest_edge bounds nothing: an engine may have "
                "it, a request may not"
            )
        try:
            return type(self)(found, self._config, self.placeholder, self._ends)
        except ValueError as error:
            raise ValueError(f"mm_processor_kwargs={dict(settings)!r}: {error}") from error

    @property
    def most_features(self) -> int | None:
        """Return how many vectors the language model gets of the largest image; None = no setting bounds them."""
        square = self.settings.patch * self.settings.merge
        return math.prod(-(-side // square) for side in self.settings.most) if self.settings.resizes else None

    def _squares(self, size: tuple[int, int]) -> tuple[int, int]:
        height, width = self.settings.resized(*size)
        square = self.settings.patch * self.settings.merge
        return height // square, width // square

    def tokens(self, size: tuple[int, int], *, alone: bool) -> int:
        return math.prod(self._squares(size))

    def expansion(self, size: tuple[int, int], *, alone: bool) -> Expansion:
        return self.of_rows(*self._squares(size))[0]

    @classmethod
    def given_merge(cls, config: Any) -> int | None:
        merge: int = getattr(config, "spatial_merge_size", 1)
        return merge

    def of_rows(self, rows: int, columns: int) -> tuple[Expansion, Int32[np.ndarray, " tokens"]]:
        return self._ends.expansion(self.placeholder, rows, columns), takes_of_rows(rows, columns)

    def prepare(self, picture: Picture, *, alone: bool) -> PreparedImage:
        patch, merge = self.settings.patch, self.settings.merge
        height, width = self.settings.resized(*picture.size)
        pixels = resized(picture.pixels, (height, width), self.settings.resample)
        arrays = {
            "pixels": patches_of(pixels, patch, merge),
            "places": places_of((1, height // patch, width // patch), merge),
            "pictures": np.array([height // patch * (width // patch)], np.int32),
            "scale": np.asarray(self.settings.scale, np.float32),
            "shift": np.asarray(self.settings.shift, np.float32),
        }
        rows, columns = self._squares(picture.size)
        return PreparedImage(arrays, rows * columns, self.of_rows(rows, columns)[1])


def patches_of(
    pixels: UInt8[np.ndarray, "height width 3"], patch: int, merge: int
) -> UInt8[np.ndarray, "patches numbers"]:
    """Return the patches of a picture, squares of `merge` x `merge` one after another, each channel by channel."""
    height, width = pixels.shape[:2]
    cut = pixels.reshape(height // patch // merge, merge, patch, width // patch // merge, merge, patch, 3)
    return cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(height // patch * (width // patch), -1)
