"""Cuts pictures and frames into the tiles of Idefics 3 and SmolVLM, which stand in the prompt with their places.

A picture's longer side is resized, then both sides to multiples of a tile; its tiles are followed by the whole picture
in the size of one (Idefics 3, Laurencon et al., 2024, section 3.1). Each tile is an item of the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int32

from jpaged.images.clips import Clip
from jpaged.images.frames import (
    LARGEST_SIDE,
    UNKNOWN_FPS,
    Indices,
    Sampling,
    clock,
    evenly,
    minutes,
    size_of_longest,
    without_ends,
)
from jpaged.images.pixels import Picture
from jpaged.images.processors import PreparedImage
from jpaged.images.prompts import Expansion, Placeholder
from jpaged.images.tiles import TilePatches, TileProcessor
from jpaged.images.videos import FrameGroup, VideoProcessor, resized
from jpaged.processor_settings import NAME

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
_SMALL, _TENS = _WORDS.split()[:20], _WORDS.split()[20:]


def fractions(side: int, table: int) -> Int32[np.ndarray, " side"]:
    """Return which of `table` places each of `side` patches has along an axis, by its distance from the picture's edge
    as a part of its side.

    Borders between places are rounded as torch's ``arange`` does with AVX2, eight at a time: a patch that lies on a
    border may get the place before it. With sides that are powers of two nothing is rounded.
    """
    step, number = 1 / table, np.arange(math.ceil((1 - 1 / table) * table - 1e-9))
    first = number // 8 * 8
    borders = (step + step * number).astype(np.float32)
    in_eights = (step + step * first).astype(np.float32).astype(np.float64) + step * (number - first)
    borders = np.where(number < len(number) // 16 * 16, in_eights.astype(np.float32), borders)
    at = np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(side))
    return np.searchsorted(borders, np.minimum(at, np.float32(1 - 1e-6)), side="right").astype(np.int32)


def in_words(number: int) -> str:
    """Return a number up to 9,999 as the package num2words writes it."""
    if number < 20:
        return _SMALL[number]
    if number < 100:
        return _TENS[number // 10 - 2] + (f"-{_SMALL[number % 10]}" if number % 10 else "")
    by, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = number % by
    joint = "" if not rest else " and " if rest < 100 else ", "
    return f"{in_words(number // by)} {name}{joint}{in_words(rest) if rest else ''}"


class _Marks:
    """Writes what stands around tiles in a prompt.

    Args:
        each: tokens of a tile.
        tokenizer: of transformers.
    """

    def __init__(self, config: Any, tokenizer: Any, each: int):
        self._tokenizer = tokenizer
        self.token: int = config.image_token_id
        self.text: str = "" if tokenizer is None else tokenizer.convert_ids_to_tokens(self.token)
        self._around = getattr(tokenizer, "fake_image_token", _AROUND)
        self._whole = getattr(tokenizer, "global_image_token", _WHOLE)
        self.each = each
        self.expansion = lru_cache(64)(self._expansion)

    def picture(self, rows: int, columns: int) -> str:
        """Return the text of a picture of so many tiles; of none = of the whole picture alone."""
        body = self.text * self.each
        text = "".join(
            "".join(f"{self._around}<row_{row + 1}_col_{column + 1}>{body}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        ended = "\n" * bool(rows)
        return f"{text}{ended}{self._around}{self._whole}{body}{self._around}"

    def _expansion(self, text: str) -> Expansion:
        if self._tokenizer is None:
            raise ValueError("tiles stand in the prompt with their places, and the model has no tokenizer for these")
        return Expansion(text, tuple(self._tokenizer.encode(text, add_special_tokens=False)))


def _tile_side(settings: Mapping[str, Any], config: Any) -> int:
    """Return the pixels of a tile's side.

    Raises:
        ValueError: it does not go with the model's config.
    """
    vision, longest = config.vision_config, (settings.get("max_image_size") or {}).get("longest_edge")
    if not longest:
        raise ValueError("the image processor's max_image_size lacks 'longest_edge'")
    side = longest // vision.patch_size
    if longest > vision.image_size or not side or side % config.scale_factor:
        raise ValueError(
            f"the image processor's max_image_size={dict(settings['max_image_size'])} is above "
            f"vision_config.image_size={vision.image_size}, or its {side} patches are no multiple of "
            f"scale_factor={config.scale_factor}"
        )
    return int(longest)


class Idefics3ImageProcessor(TileProcessor):
    """Idefics 3 and SmolVLM: tiles row by row, then the whole picture; for the arrays see `TilePatches`."""

    def __init__(self, processor: Any, config: Any, placeholder: Placeholder, tokenizer: Any = None):
        super().__init__(processor, config, placeholder, tokenizer, merge=config.scale_factor, along=fractions)
        self._longest = int(dict(processor.size)["longest_edge"])
        self._splits = bool(processor.do_image_splitting)
        self._tile = _tile_side(processor.to_dict(), config)
        each = (self._tile // config.vision_config.patch_size // config.scale_factor) ** 2
        self._marks = _Marks(config, tokenizer, each)

    def _check_size(self, processor: Any) -> None:
        if not dict(processor.size).get("longest_edge"):
            raise ValueError(f"the image processor's size={dict(processor.size)} lacks 'longest_edge'")

    def with_settings(self, settings: Mapping[str, Any], *, of_request: bool) -> Any:
        if of_request and settings.get("do_image_splitting") and not self._splits:
            raise ValueError(
                "mm_processor_kwargs has do_image_splitting=True, which makes more tiles of a picture than the engine "
                "does: a request may turn it off, not on"
            )
        made = super().with_settings(settings, of_request=of_request)
        assert isinstance(made, type(self))
        if of_request and made._splits and made._tile < self._tile:
            raise ValueError(
                f"mm_processor_kwargs has max_image_size={settings['max_image_size']!r}, which makes more tiles of a "
                f"picture: a request leaves it at longest_edge={self._tile}, or has do_image_splitting=False too"
            )
        return made

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of tiles of a picture of (height, width) pixels, besides the whole one."""
        if not self._splits:
            return 0, 0
        height, width = _within(*size_of_longest(size, self._longest, self._longest))
        tile, ratio = self._tile, width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        if not height or not width:
            raise ValueError(f"{size[1]} x {size[0]} pixels are too oblong: a side becomes less than a pixel")
        return (height // tile, width // tile) if max(height, width) > tile else (0, 0)

    def parts(self, size: tuple[int, int], *, alone: bool) -> int:
        rows, columns = self.grid(size)
        return rows * columns + 1

    def tokens(self, size: tuple[int, int], *, alone: bool) -> int:
        return self._marks.each * self.parts(size, alone=alone)

    def expansion(self, size: tuple[int, int], *, alone: bool) -> Expansion:
        return self._marks.expansion(self._marks.picture(*self.grid(size)))

    def prepare(self, picture: Picture, *, alone: bool) -> PreparedImage:
        raise NotImplementedError("a picture has several tiles: see prepare_parts")

    def prepare_parts(self, picture: Picture, *, alone: bool) -> Sequence[PreparedImage]:
        tiles = self._tiles(picture)
        return [PreparedImage(self._patches.arrays(tile[None]), self._marks.each) for tile in tiles]


def _within(height: int, width: int) -> tuple[int, int]:
    """Return sides of the same shape, none above 4,096 pixels."""
    ratio = width / height
    if width >= height and width > LARGEST_SIDE:
        return max(int(LARGEST_SIDE / ratio), 1), LARGEST_SIDE
    if height > width and height > LARGEST_SIDE:
        return LARGEST_SIDE, max(int(LARGEST_SIDE * ratio), 1)
    return height, width


class SmolVLMVideoProcessor(VideoProcessor):
    """SmolVLM: each frame is a tile, after its time; the prompt says how many there are, and of how long a video."""

    own: ClassVar[tuple[str, ...]] = ("video_sampling",)
    _NESTED: ClassVar[Mapping[str, str]] = {"video_size": "size"}

    defaults: ClassVar[Mapping[str, Any]] = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "do_sample_frames": False,
        "fps": 1,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "max_frames": 64,
        "max_image_size": {"longest_edge": 364},
        "resample": 1,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": 4 * 364},
    }

    def __init__(
        self, settings: Mapping[str, Any], config: Any, placeholder: Placeholder, tokenizer: Any = None
    ) -> None:
        super().__init__(settings, config, placeholder, tokenizer)
        longest = dict(self.settings["size"]).get("longest_edge")
        if not longest or not self.settings["do_resize"]:
            raise ValueError(f"the video processor's size={self.settings['size']} lacks 'longest_edge'")
        self._longest = int(longest)
        self._tile = _tile_side(self.settings, config)
        self._patches = TilePatches(config.vision_config, self.settings, config.scale_factor, along=fractions)
        each = (self._tile // config.vision_config.patch_size // config.scale_factor) ** 2
        self._marks = _Marks(config, tokenizer, each)

    def sampler(self, total: int, fps: float | None, sampling: Sampling) -> Indices:
        """See `without_ends`; a request's number of frames is taken evenly."""
        return evenly(total, fps, sampling) if sampling.num_frames else without_ends(total, fps, sampling)

    @classmethod
    def plain(cls, settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Return settings in which ``video_sampling``, and ``num_frames`` as most frames, are settings like others."""
        found, nested = dict(settings), settings.get("video_sampling")
        nested = {} if nested is None else nested
        if not isinstance(nested, Mapping):
            raise ValueError(f"{name} has video_sampling={nested!r}, which must be a mapping")
        if name == NAME and (unknown := sorted(nested.keys() - {"fps", "max_frames", "video_size"})):
            raise ValueError(f"{name}'s video_sampling has {unknown[0]!r}: it has fps, max_frames and video_size")
        found.pop("video_sampling", None)
        of_file = found.get("size")
        ways = [("max_frames", found.pop("num_frames", None))]
        ways += [(cls._NESTED.get(key, key), value) for key, value in nested.items()]
        for key, value in ways:
            if value is None:
                continue
            if name == NAME and found.get(key) not in (None, value):
                raise ValueError(f"{name} has {key}={found[key]!r} and, in another way, {value!r}: give one of them")
            found[key] = value
        return found if of_file is None else {**found, "size": of_file}  # it wins over a file's video_size

    def of_files(self, sampling: Sampling) -> Sampling:
        return sampling

    def expansion(self, clip: Clip) -> Expansion:
        times = minutes(clip.indices, clip.fps)
        seconds = clip.indices[-1] / (clip.fps or UNKNOWN_FPS) if clip.duration is None else clip.duration
        text = (
            f"You are provided the following series of {in_words(len(times))} frames from a "
            f"{clock(seconds)} [H:MM:SS] video.\n"
        )
        text += "".join(f"\nFrame from {time}:{self._marks.picture(0, 0)}" for time in times)
        return self._marks.expansion(text + "\n\n")

    @classmethod
    def placeholder_in(cls, config: Any, tokenizer: Any) -> Placeholder:
        """Frames have the image's token; a tokenizer need not know the one that stands for a video."""
        image = config.image_token_id
        text = getattr(tokenizer, "video_token", "<video>")
        known = None if tokenizer is None else tokenizer.convert_tokens_to_ids(text)
        if known is None or known == getattr(tokenizer, "unk_token_id", None):
            known = -1
        image_text = "" if tokenizer is None else tokenizer.convert_ids_to_tokens(image)
        return Placeholder(known, text, image, image_text, modality="video")

    def groups(self, clip: Clip) -> list[FrameGroup]:
        return [FrameGroup(number, number + 1, self._marks.each) for number in range(len(clip.frames))]

    def prepare(self, clip: Clip, group: FrameGroup) -> PreparedImage:
        frames, filter_ = clip.frames[group.first : group.last], self.settings["resample"]
        size = size_of_longest(clip.size, self._longest)
        for wanted in (size, (self._tile, self._tile)):
            frames = resized(frames, wanted, filter_).transpose(0, 2, 3, 1)
        return PreparedImage(self._patches.arrays(frames.transpose(0, 3, 1, 2)), self._marks.each)
