"""Cuts pictures and frames of videos into the patches that Gemma 4's towers take.

A picture keeps its shape: it gets the largest sides for which the squares that one token stands for are no more than a
budget, ``max_soft_tokens`` (70 to 1,120). The arrays are those of transformers' processor on Pillow, except that pixels
stay bytes and squares follow one another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int16, UInt8

from jpaged.images.clips import Clip
from jpaged.images.frames import Size, minutes, size_of_patches
from jpaged.images.pixels import Picture, resized
from jpaged.images.processors import ImageProcessor, PreparedImage, placeholder_of
from jpaged.images.prompts import Expansion, Placeholder
from jpaged.images.qwen import affine, processor_fields
from jpaged.images.videos import FrameGroup, VideoProcessor
from jpaged.processor_settings import replaced

BUDGETS = (70, 140, 280, 560, 1120)
"""Tokens that a picture may have at most; the values that transformers takes."""
_DEFAULTS: Mapping[str, Any] = {
    "do_normalize": False,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": (0.0, 0.0, 0.0),
    "image_std": (1.0, 1.0, 1.0),
    "max_soft_tokens": 280,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "resample": 3,
    "rescale_factor": 1 / 255,
}
"""Settings that a request may replace, with transformers' values."""


@dataclass(frozen=True)
class BudgetSettings:
    """Says how pictures become patches.

    Attributes:
        patch, pool: pixels of a patch's side, and patches of the side of a square that one token stands for.
        budget: most tokens of a picture.
        resample: Pillow's number of the filter.
        resizes: False leaves the size as it is.
        scale, shift: what a channel's bytes are multiplied by, and what is added then.
        joins: whether the patches of a square are one patch, as the model takes them that has no layers for pictures.
        longest: most of the patches that it takes, along a side.
    """

    patch: int
    pool: int
    budget: int
    resample: int
    resizes: bool
    scale: tuple[float, ...]
    shift: tuple[float, ...]
    joins: bool
    longest: int

    @classmethod
    def of(cls, fields: Mapping[str, Any], vision: Any) -> BudgetSettings:
        """Read a checkpoint's file, and compare it with its config.

        Raises:
            ValueError: they contradict each other, or the budget is none of `BUDGETS`.
        """
        found = {**_DEFAULTS, **{name: value for name, value in fields.items() if value is not None}}
        sides = found["patch_size"], found["pooling_kernel_size"]
        known = vision.patch_size, vision.pooling_kernel_size
        if sides != known:
            raise ValueError(
                f"the processor's patch_size and pooling_kernel_size are {sides}, and vision_config's {known}"
            )
        budget = found["max_soft_tokens"]
        if budget not in BUDGETS:
            raise ValueError(f"max_soft_tokens={budget!r} is none of {', '.join(map(str, BUDGETS))}")
        scale, shift = affine(found, 3, (0.0,) * 3, (1.0,) * 3)
        joins = not hasattr(vision, "position_embedding_size")
        longest = vision.mm_posemb_size if joins else vision.position_embedding_size
        return cls(*known, budget, int(found["resample"]), found["do_resize"], scale, shift, joins, longest)

    @property
    def square(self) -> int:
        """Return the pixels of the side of what one token stands for."""
        return self.patch * self.pool

    def resized(self, height: int, width: int) -> Size:
        """Return the height and width to which a picture is resized.

        Raises:
            ValueError: it is too narrow, or longer than positions are known for; or no multiple of a square where
                nothing is resized.
        """
        if self.resizes:
            size = size_of_patches((height, width), patch=self.patch, most=self.budget * self.pool**2, pool=self.pool)
        elif height % self.square or width % self.square:
            raise ValueError(f"{width} x {height} pixels are no multiples of {self.square}, and do_resize=False")
        else:
            size = height, width
        patches = max(size) // self.cut[0]
        if patches > self.longest:
            raise ValueError(
                f"{width} x {height} pixels are {patches} patches long, the model knows {self.longest} positions"
            )
        return size

    @property
    def cut(self) -> tuple[int, int]:
        """Return the pixels of the side of a patch that the model takes, and how many make the side of a square."""
        return (self.square, 1) if self.joins else (self.patch, self.pool)

    def tokens(self, size: Size) -> int:
        """Return how many tokens a picture of a size takes."""
        height, width = self.resized(*size)
        return height // self.square * (width // self.square)


class Gemma4ImageProcessor(ImageProcessor):
    """Gemma 4 and Gemma 4 Unified.

    Arrays, for each patch, square by square: pixels [patches, 3 * patch * patch], and places [patches, 2], its column
    and row. For the picture: frames, the number of its patches; scale and shift [3].
    """

    def __init__(self, fields: Mapping[str, Any], config: Any, placeholder: Placeholder):
        """Read the settings of a checkpoint's file.

        Raises:
            ValueError: see `BudgetSettings.of`.
        """
        self.settings = BudgetSettings.of(fields, config.vision_config)
        super().__init__(placeholder, {"family": config.model_type, "settings": asdict(self.settings)})
        self._fields, self._config = fields, config

    @classmethod
    def open(cls, folder: str | os.PathLike[str], config: Any, tokenizer: Any) -> ImageProcessor:
        return cls(processor_fields(folder), config, placeholder_of(config, tokenizer))

    def with_settings(self, settings: Mapping[str, Any], *, of_request: bool) -> ImageProcessor:
        if not settings:
            return self
        known = {name: value for name, value in self._fields.items() if name in _DEFAULTS and value is not None}
        found = replaced({**_DEFAULTS, **known}, settings, of_request=of_request)
        if of_request and self.settings.resizes and not found["do_resize"]:
            raise ValueError(
                "mm_processor_kwargs has do_resize=False, with which max_soft_tokens bounds nothing: an engine may "
                "have it, a request may not"
            )
        try:
            return type(self)(found, self._config, self.placeholder)
        except ValueError as error:
            raise ValueError(f"mm_processor_kwargs={dict(settings)!r}: {error}") from error

    @property
    def most_features(self) -> int | None:
        return self.settings.budget if self.settings.resizes else None

    def tokens(self, size: Size, *, alone: bool) -> int:
        return self.settings.tokens(size)

    def prepare(self, picture: Picture, *, alone: bool) -> PreparedImage:
        return self.prepare_pixels(picture.pixels)

    def prepare_pixels(self, pixels: UInt8[np.ndarray, "height width 3"]) -> PreparedImage:
        """Return the arrays of a picture or of a video's frame."""
        settings = self.settings
        height, width = settings.resized(*pixels.shape[:2])
        pixels = resized(pixels, (height, width), settings.resample)
        patch, pool = settings.cut
        rows, columns = height // patch, width // patch
        squares = _by_squares(pixels.reshape(rows, patch, columns, patch, 3), pool)
        arrays = {
            "pixels": squares.transpose(0, 3, 1, 2).reshape(rows * columns, -1),
            "places": places_of(rows, columns, pool),
            "frames": np.array([rows * columns], np.int32),
            "scale": np.asarray(settings.scale, np.float32),
            "shift": np.asarray(settings.shift, np.float32),
        }
        return PreparedImage(arrays, rows * columns // pool**2)


def _by_squares(
    cut: UInt8[np.ndarray, "rows patch columns patch 3"], pool: int
) -> UInt8[np.ndarray, "patches patch patch 3"]:
    rows, patch, columns = cut.shape[:3]
    squares = cut.reshape(rows // pool, pool, patch, columns // pool, pool, patch, 3)
    return squares.transpose(0, 3, 1, 4, 2, 5, 6).reshape(rows * columns, patch, patch, 3)


def places_of(rows: int, columns: int, pool: int) -> Int16[np.ndarray, "patches 2"]:
    """Return the column and row of each patch, square by square."""
    places = np.indices((rows, columns), np.int16)[::-1].reshape(2, rows // pool, pool, columns // pool, pool)
    return places.transpose(1, 3, 2, 4, 0).reshape(-1, 2)


class Gemma4VideoProcessor(VideoProcessor):
    """Gemma 4: each frame is a picture of its own, after its time in minutes and seconds.

    Arrays: see `Gemma4ImageProcessor`.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        **_DEFAULTS,
        "do_normalize": True,
        "do_sample_frames": True,
        "max_soft_tokens": 70,
    }

    def __init__(
        self, settings: Mapping[str, Any], config: Any, placeholder: Placeholder, tokenizer: Any = None
    ) -> None:
        number = {} if settings.get("num_frames") or settings.get("fps") else {"num_frames": 32}
        super().__init__({**number, **settings}, config, placeholder, tokenizer)
        self._pictures = Gemma4ImageProcessor(self.settings, config, placeholder)
        self._around = config.boi_token_id, config.eoi_token_id

    @property
    def most_features(self) -> int | None:
        return self._pictures.most_features

    def expansion(self, clip: Clip) -> Expansion:
        if self.tokenizer is None:
            raise ValueError("a video has the times of its frames, and the model has no tokenizer for them")
        start, end = self._around
        begin, stop = self.tokenizer.convert_ids_to_tokens([start, end])
        tokens = self._pictures.settings.tokens(clip.size)
        text, ids = "", list[int]()
        for number, time in enumerate(minutes(clip.indices, clip.fps)):
            said = f"{' ' if number else ''}{time} "
            text += f"{said}{begin}{self.placeholder.image_text * tokens}{stop}"
            of_time = self.tokenizer.encode(said, add_special_tokens=False)
            ids += [*of_time, start, *[self.placeholder.image_token] * tokens, end]
        return Expansion(text, tuple(ids))

    def groups(self, clip: Clip) -> list[FrameGroup]:
        tokens = self._pictures.settings.tokens(clip.size)
        return [FrameGroup(frame, frame + 1, tokens) for frame in range(len(clip.frames))]

    def prepare(self, clip: Clip, group: FrameGroup) -> PreparedImage:
        return self._pictures.prepare_pixels(clip.frames[group.first])
