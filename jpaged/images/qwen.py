"""Cuts pictures into the patches that the towers of the Qwen-VL families take.

A picture keeps its shape: its sides are rounded to multiples of a square that one token stands for, and resized so that
it has neither too many nor too few pixels (Qwen2-VL, Wang et al., 2024, section 2.1). The arrays are those of
transformers' processor on Pillow, except that pixels stay bytes: the tower scales them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int16, Int32, UInt8

from jpaged.images.frames import MOST_OBLONG, check_oblong
from jpaged.images.given import GivenLayout, Grid
from jpaged.images.pixels import Picture, resized
from jpaged.images.processors import ImageProcessor, PreparedImage, placeholder_of, settings_of
from jpaged.images.prompts import Placeholder
from jpaged.processor_settings import replaced

_BICUBIC = 3
_MOST_VALUE = 1e6
"""Scaled pixels stay below this."""
OF_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""CLIP's mean and standard deviation of each channel, which transformers takes where a file names none."""
SCALING: Mapping[str, Any] = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": OF_CLIP[0],
    "image_std": OF_CLIP[1],
    "resample": _BICUBIC,
    "rescale_factor": 1 / 255,
}
"""Settings of how pixels become numbers, with the values that most of transformers' processors have."""
_DEFAULTS: Mapping[str, Any] = {**SCALING, "merge_size": 2, "patch_size": 14, "temporal_patch_size": 2}
"""Settings that a request may replace, with transformers' values."""


def processor_fields(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a checkpoint's files say of how images are prepared.

    Raises:
        ValueError: no file says it, or one is no JSON object.
    """
    whole, alone = "processor_config.json", "preprocessor_config.json"
    found = next(settings_of(folder, (whole, "image_processor"), (alone, None)), None)
    if found is None:
        raise ValueError(f"neither {alone} nor {whole} in {folder} says how images are prepared")
    return found


def affine(
    fields: Mapping[str, Any], channels: int, mean: Sequence[float], std: Sequence[float], *, normalises: bool = True
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return what a checkpoint's file multiplies each channel's bytes by, and what it adds then.

    Args:
        mean, std, normalises: where the file says nothing of ``image_mean``, ``image_std`` and ``do_normalize``.

    Raises:
        ValueError: a list has not a number for each channel, or pixels become too large.
    """
    factor = fields.get("rescale_factor", 1 / 255) if fields.get("do_rescale", True) else 1.0
    if fields.get("do_normalize", normalises):
        mean, std = (
            usual if fields.get(name) is None else fields[name]
            for name, usual in (("image_mean", mean), ("image_std", std))
        )
    else:
        mean, std = (0.0,) * channels, (1.0,) * channels
    if not len(mean) == len(std) == channels:
        raise ValueError(f"image_mean={mean!r} and image_std={std!r} must have {channels} numbers each")
    if not all(
        by and abs(255 * factor / by) + abs(each / by) < _MOST_VALUE for each, by in zip(mean, std, strict=True)
    ):
        raise ValueError(f"image_mean={mean!r}, image_std={std!r} and rescale_factor={factor!r} make too large pixels")
    return tuple(factor / each for each in std), tuple(-each / by for each, by in zip(mean, std, strict=True))


@dataclass(frozen=True)
class PatchSettings:
    """Says how pictures become patches; the defaults are transformers'.

    Attributes:
        patch, temporal, merge: pixels of a patch's side, frames of a patch, and patches of the side of a square that
            one token stands for.
        least, most: pixels of a picture once it was resized.
        resample: Pillow's number of the filter.
        resizes: False leaves the size as it is.
        scale, shift: what a channel's bytes are multiplied by, and what is added then.
        window: tokens of the side of a window, by which patches are ordered (Qwen2.5-VL); None = row by row.
    """

    patch: int
    temporal: int
    merge: int
    least: int
    most: int
    resample: int
    resizes: bool
    scale: tuple[float, ...]
    shift: tuple[float, ...]
    window: int | None = None
    default_size: ClassVar[Mapping[str, int]] = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    default_temporal: ClassVar[int] = 2

    @classmethod
    def of(cls, fields: Mapping[str, Any], vision: Any) -> PatchSettings:
        """Read a checkpoint's file, and compare it with its config.

        Raises:
            ValueError: they contradict each other, or a bound is missing.
        """
        found = {"patch_size": 14, "temporal_patch_size": cls.default_temporal, "merge_size": 2}
        found = {name: fields.get(name) or default for name, default in found.items()}
        known = vision.patch_size, getattr(vision, "temporal_patch_size", 1), vision.spatial_merge_size
        if tuple(found.values()) != known:
            raise ValueError(f"the image processor has {found}, and vision_config {known}")
        size = dict(fields.get("size") or cls.default_size)
        least, most = (
            fields.get(legacy) or size.get(name)
            for legacy, name in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
        )
        if not least or not most:
            raise ValueError(f"the image processor's size={size} lacks 'shortest_edge' or 'longest_edge'")
        scale, shift = affine(fields, getattr(vision, "in_channels", 3), *OF_CLIP)
        resample = _BICUBIC if fields.get("resample") is None else int(fields["resample"])
        return cls(
            *known,
            int(least),
            int(most),
            resample,
            fields.get("do_resize", True),
            scale,
            shift,
            _window(vision),
        )

    @property
    def square(self) -> int:
        """Return the pixels of the side of what one token stands for."""
        return self.patch * self.merge

    def most_squares(self, frames: int = 1) -> int | None:
        """Return the most squares of a picture once it was resized, or of one of `frames` frames that share the bounds;
        None where nothing is resized."""
        if not self.resizes:
            return None
        few, many = (pixels / (frames * self.square**2) for pixels in (self.least, self.most))
        # A side that shrinks below a square stays one square; sides that grow are rounded up.
        narrow = min(MOST_OBLONG, math.sqrt(MOST_OBLONG * many))
        grown = few + math.sqrt(MOST_OBLONG * few) + math.sqrt(few / MOST_OBLONG) + 1
        return max(1, int(max(many, narrow, grown)))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which a picture is resized.

        Raises:
            ValueError: it is too oblong, or no multiple of a square where nothing is resized.
        """
        square = self.square
        if not self.resizes:
            if height % square or width % square:
                raise ValueError(f"{width} x {height} pixels are no multiples of {square}, and do_resize=False")
            return height, width
        check_oblong((height, width), (height, width))
        rows, columns = round(height / square), round(width / square)
        if rows * columns * square**2 > self.most:
            shrink = math.sqrt(height * width / self.most)
            rows, columns = (max(1, math.floor(side / shrink / square)) for side in (height, width))
        elif rows * columns * square**2 < self.least:
            grow = math.sqrt(self.least / (height * width))
            rows, columns = (math.ceil(side * grow / square) for side in (height, width))
        if not rows or not columns:
            raise ValueError(f"{width} x {height} pixels are less than a square of {square}")
        return rows * square, columns * square


class QwenImageProcessor(ImageProcessor):
    """Qwen2-VL and those after it.

    Arrays, for each patch, square by square: pixels [patches, channels * temporal * patch * patch], and places
    [patches, 4], its row and column, and the rows and columns that there are. For each frame: frames, the number of its
    patches. For all: scale and shift [channels]. With windows: windows, the number of patches of each.
    """

    patches: ClassVar[type[PatchSettings]] = PatchSettings

    def __init__(self, fields: Mapping[str, Any], config: Any, placeholder: Placeholder):
        """Read the settings of a checkpoint's file.

        Raises:
            ValueError: they contradict the config, or a bound is missing.
        """
        settings = self.patches.of(fields, config.vision_config)
        super().__init__(placeholder, {"family": config.model_type, "settings": asdict(settings)})
        self._fields, self._config = fields, config
        self.settings = settings
        self.layout = GivenLayout(config.get_text_config().hidden_size, settings.merge)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], config: Any, tokenizer: Any) -> ImageProcessor:
        return cls(processor_fields(folder), config, placeholder_of(config, tokenizer))

    @property
    def most_features(self) -> int | None:
        return self.settings.most_squares()

    def with_settings(self, settings: Mapping[str, Any], *, of_request: bool) -> ImageProcessor:
        if not settings:
            return self
        now = self.settings
        bounds = {"shortest_edge": now.least, "longest_edge": now.most}
        has = {
            **_DEFAULTS,
            **{name: value for name, value in self._fields.items() if name in _DEFAULTS},
            "size": bounds,
            "temporal_patch_size": now.temporal,
        }
        found = replaced(has, settings, of_request=of_request)
        if of_request and now.resizes and not found["do_resize"]:
            raise ValueError(
                "mm_processor_kwargs has do_resize=False, with which longest_edge bounds nothing: an engine may have "
                "it, a request may not"
            )
        try:
            return type(self)(found, self._config, self.placeholder)
        except ValueError as error:
            raise ValueError(f"mm_processor_kwargs={dict(settings)!r}: {error}") from error

    def grid(self, size: tuple[int, int], frames: int = 1) -> Grid:
        """Return the patches of so many frames of (height, width) pixels, in time, height and width."""
        height, width = self.settings.resized(*size)
        return -(-frames // self.settings.temporal), height // self.settings.patch, width // self.settings.patch

    def tokens(self, size: tuple[int, int], *, alone: bool) -> int:
        return self.layout.tokens(self.grid(size))

    def prepare(self, picture: Picture, *, alone: bool) -> PreparedImage:
        return self.prepare_frames(self.resize(picture.pixels)[None])

    def resize(self, pixels: UInt8[np.ndarray, "height width 3"]) -> UInt8[np.ndarray, "rows columns 3"]:
        """Return a picture in the size that the tower takes."""
        return resized(pixels, self.settings.resized(*pixels.shape[:2]), self.settings.resample)

    def prepare_frames(self, frames: UInt8[np.ndarray, "frames height width 3"]) -> PreparedImage:
        """Return the arrays of frames that were resized; the last one is repeated to fill a patch."""
        patch, temporal, merge = self.settings.patch, self.settings.temporal, self.settings.merge
        frames = np.concatenate([frames, np.repeat(frames[-1:], -len(frames) % temporal, axis=0)])
        time, height, width = len(frames) // temporal, frames.shape[1] // patch, frames.shape[2] // patch
        cut = frames.reshape(time, temporal, height // merge, merge, patch, width // merge, merge, patch, 3)
        pixels = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(time * height * width, -1)
        grid = time, height, width
        arrays = {
            "pixels": pixels,
            "places": places_of(grid, merge),
            "frames": np.full(time, height * width, np.int32),
            "scale": np.asarray(self.settings.scale, np.float32),
            "shift": np.asarray(self.settings.shift, np.float32),
        }
        takes = None
        if self.settings.window is not None:
            order, lengths = windows_of(grid, merge, self.settings.window)
            for name in ("pixels", "places"):
                squares = arrays[name].reshape(len(order), -1, arrays[name].shape[1])
                arrays[name] = squares[order].reshape(arrays[name].shape)
            arrays["windows"] = lengths * merge**2
            takes = np.argsort(order).astype(np.int32)
        return PreparedImage(
            arrays,
            self.layout.tokens(grid),
            takes,
            offsets=self.layout.offsets(grid),
            advance=self.layout.advance(grid),
        )


def _window(vision: Any) -> int | None:
    pixels = getattr(vision, "window_size", None)
    return None if pixels is None else pixels // vision.spatial_merge_size // vision.patch_size


def windows_of(
    grid: Grid, merge: int, window: int
) -> tuple[Int32[np.ndarray, " tokens"], Int32[np.ndarray, " windows"]]:
    """Return the tokens of a grid window by window, those of each row by row, and how many each window has."""
    time, height, width = grid[0], grid[1] // merge, grid[2] // merge
    frame, row, column = np.indices((time, height, width), np.int32).reshape(3, -1)
    across = -(-width // window)
    number = (frame * -(-height // window) + row // window) * across + column // window
    return np.argsort(number, kind="stable").astype(np.int32), np.bincount(number).astype(np.int32)


def places_of(grid: Grid, merge: int) -> Int16[np.ndarray, "patches 4"]:
    """Return the row and column of each patch, square by square, and the number of rows and columns."""
    time, height, width = grid
    places = np.indices((height, width), np.int16).reshape(2, height // merge, merge, width // merge, merge)
    places = np.tile(places.transpose(1, 3, 2, 4, 0).reshape(-1, 2), (time, 1))
    return np.concatenate([places, np.broadcast_to(np.array([height, width], np.int16), places.shape)], axis=1)
