"""Makes the arrays that a model's vision encoder takes of a video, in NumPy and Pillow.

A family is a row of `_PROCESSORS`. Each group of frames that its encoder takes together is an item of the prompt, so
that two prompts with the same beginning of a video share it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import UInt8

from jpaged.images import anyres, pixels
from jpaged.images.clips import Clip
from jpaged.images.frames import SETTINGS, Sampler, Sampling, evenly
from jpaged.images.processors import PreparedImage, settings_of
from jpaged.images.prompts import Expansion, Placeholder, expansion
from jpaged.images.qwen import OF_CLIP
from jpaged.images.tiles import TilePatches, taken
from jpaged.processor_settings import BOUNDS_OF_PIXELS, NAME, check_bound, counts_pixels, replaced

_FILES = (
    ("processor_config.json", "video_processor"),
    ("video_preprocessor_config.json", None),
    ("preprocessor_config.json", None),
)
_FRAMES_OF_FILES = 32
"""Frames that are taken of a file whose checkpoint does not say how many."""


def resized(
    frames: UInt8[np.ndarray, "frames height width 3"], size: tuple[int, int], resample: int
) -> UInt8[np.ndarray, "frames 3 rows columns"]:
    """Return frames of (height, width) `size`, by the filter of this number of Pillow's."""
    return np.stack([pixels.resized(each, size, resample) for each in frames]).transpose(0, 3, 1, 2)


@dataclass(frozen=True)
class FrameGroup:
    """Frames that the encoder takes together.

    Attributes:
        first, last: the frames [`first`, `last`) of a clip.
        tokens: the prompt's tokens that stand for them.
        ends: whether they are the clip's last, where that matters to the model.
        size: height and width that the frames get, where the clip's length decides them.
    """

    first: int
    last: int
    tokens: int
    ends: bool = False
    size: tuple[int, int] | None = None


class VideoProcessor(ABC):
    """Prepares videos for one model.

    Attributes:
        placeholder: what stands for a video in a prompt, and the token that replaces it.
        sampling: which frames are taken where a request does not say it.
        sampler: chooses them.
    """

    defaults: ClassVar[Mapping[str, Any]]
    """Settings that the checkpoint's file may lack."""

    unread: ClassVar[tuple[str, ...]] = ()
    """Settings of the checkpoint's file that are not looked at, as transformers' processor has it."""

    own: ClassVar[tuple[str, ...]] = ()
    """Settings that no processor of images has; an engine may give them and those of `defaults`."""

    bounded_below: ClassVar[bool] = True
    """Whether ``min_frames`` bounds what a rate makes."""

    sampler: Sampler = staticmethod(evenly)

    def __init__(
        self, settings: Mapping[str, Any], config: Any, placeholder: Placeholder, tokenizer: Any = None
    ) -> None:
        """Read the checkpoint's settings.

        Args:
            tokenizer: the model's, which makes ids of the times of frames where the model is shown these.

        Raises:
            ValueError: one is not supported, or contradicts the model's config.
        """
        self.placeholder = placeholder
        self.tokenizer = tokenizer
        self.settings = {**self.defaults, **{name: value for name, value in settings.items() if value is not None}}
        self.sampling = Sampling().given(self.settings, "the video processor's file")
        shown = {name: value for name, value in self.settings.items() if name not in SETTINGS}
        named = {"family": config.model_type, "processor": shown}
        self._name = json.dumps(named, sort_keys=True, default=str).encode()

    @classmethod
    def plain(cls, settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Return settings of a file or an engine under the names that are looked at, so that an engine's replace those
        of a file whatever either calls them.

        Args:
            name: how errors name them.

        Raises:
            ValueError: they contradict each other.
        """
        return settings

    def sampling_of_request(self, settings: Mapping[str, Any]) -> Sampling:
        """Return which frames are taken for a request that has these settings of frames.

        Raises:
            ValueError: one is of another type or out of range, raises the engine's ``max_frames``, or changes nothing.
        """
        made = self.sampling.given(settings, NAME)
        for name in ("max_frames", "num_frames"):
            if settings.get(name) is not None and self.sampling.max_frames is not None:
                check_bound(name, settings[name], self.sampling.max_frames)
        self._check_least(settings, made)
        return replace(made, most_given=settings.get("max_frames") or made.most_given)

    def bounded_by_engine(self, settings: Mapping[str, Any]) -> None:
        """Note the bounds of an engine's settings, which hold for frames in memory too.

        Raises:
            ValueError: one changes nothing.
        """
        self._check_least(settings, self.sampling)
        self.sampling = replace(self.sampling, most_given=settings.get("max_frames"))

    def _check_least(self, settings: Mapping[str, Any], made: Sampling) -> None:
        if settings.get("min_frames") is not None and not (self.bounded_below and made.fps is not None):
            raise ValueError(
                f"{NAME} has min_frames={settings['min_frames']}, which bounds what fps makes, and here another way "
                "says which frames are taken"
            )

    @classmethod
    def placeholder_in(cls, config: Any, tokenizer: Any) -> Placeholder:
        """Return what stands for a video in prompts."""
        token = config.video_token_id
        text = "" if tokenizer is None else tokenizer.convert_ids_to_tokens(token) or ""
        return Placeholder(token, text, token, text, modality="video")

    def of_files(self, sampling: Sampling) -> Sampling:
        """Return how a video of a file is sampled, whose frames were not chosen by its caller."""
        if sampling.num_frames is None and sampling.fps is None:
            return replace(sampling, num_frames=min(_FRAMES_OF_FILES, sampling.max_frames or _FRAMES_OF_FILES))
        return sampling

    @property
    def most_features(self) -> int | None:
        """Return how many vectors the language model gets of the largest group; None = no setting bounds them."""
        return None

    def digest(self, clip: Clip, group: FrameGroup) -> bytes:
        """Return 32 bytes that are equal for groups whose features are equal, in any process."""
        state = hashlib.blake2b(digest_size=32, person=b"jpaged-video")
        state.update(self._name + repr(group.size).encode())
        state.update(clip.digest(group.first, group.last) + bytes([group.ends]))
        return state.digest()

    def expansion(self, clip: Clip) -> Expansion:
        """Return what takes the place of a clip's placeholder."""
        return expansion(self.placeholder, sum(group.tokens for group in self.groups(clip)))

    @abstractmethod
    def groups(self, clip: Clip) -> list[FrameGroup]:
        """Return the groups of a clip's frames, in order."""

    @abstractmethod
    def prepare(self, clip: Clip, group: FrameGroup) -> PreparedImage:
        """Return the encoder's arrays of a group."""


class LlavaOnevisionVideoProcessor(VideoProcessor):
    """LLaVA-OneVision: each frame is a tile whose features are halved on both sides; a newline ends the video.

    Arrays: those of a picture; see `jpaged.images.tiles.LlavaOnevisionImageProcessor`.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": OF_CLIP[0],
        "image_std": OF_CLIP[1],
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": 384, "width": 384},
    }
    _TOGETHER = 8
    """Most frames of a group: few enough for a step."""

    def __init__(
        self, settings: Mapping[str, Any], config: Any, placeholder: Placeholder, tokenizer: Any = None
    ) -> None:
        super().__init__(settings, config, placeholder, tokenizer)
        tile = config.vision_config.image_size
        size = self.settings["size"]
        if (size.get("height"), size.get("width")) != (tile, tile) or not self.settings["do_resize"]:
            raise ValueError(f"the video processor's size={dict(size)} is not vision_config.image_size={tile}")
        self._tile = tile
        self._side: int = tile // config.vision_config.patch_size
        self._patches = TilePatches(config.vision_config, self.settings)
        most = max((height // tile) * (width // tile) for height, width in config.image_grid_pinpoints)
        self._together = min(self._TOGETHER, 1 + most)  # no group is larger than the largest picture

    @cached_property
    def _pooled(self) -> int:
        return -(-self._side // 2)

    def groups(self, clip: Clip) -> list[FrameGroup]:
        number, each = len(clip.frames), self._pooled**2
        starts = range(0, number, self._together)
        found = [
            FrameGroup(first, last := min(first + self._together, number), (last - first) * each) for first in starts
        ]
        return [*found[:-1], replace(found[-1], tokens=found[-1].tokens + 1, ends=True)]

    def prepare(self, clip: Clip, group: FrameGroup) -> PreparedImage:
        frames = clip.frames[group.first : group.last]
        tiles = resized(frames, (self._tile, self._tile), self.settings["resample"])
        chosen = taken(
            self._patches, *anyres.pooling(group.last - group.first, self._side, self._pooled, newline=group.ends)
        )
        return PreparedImage(self._patches.arrays(tiles) | chosen, len(chosen["takes"]))


_PROCESSORS = {
    "smolvlm": "jpaged.images.idefics3:SmolVLMVideoProcessor",
    "internvl": "jpaged.images.internvl:InternVLVideoProcessor",
    **dict.fromkeys(("gemma4", "gemma4_unified"), "jpaged.images.gemma4:Gemma4VideoProcessor"),
    "llava_onevision": f"{__name__}:LlavaOnevisionVideoProcessor",
    **dict.fromkeys(("glm4v", "glm4v_moe"), "jpaged.images.glm_videos:GlmVideoProcessor"),
    "glm46v": "jpaged.images.glm_videos:Glm46VideoProcessor",
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "jpaged.images.qwen_videos:Qwen2VideoProcessor"),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "jpaged.images.qwen_videos:Qwen3VideoProcessor"
    ),
}
"""The processor's class by ``config.model_type``; named, as a family's own module imports this one."""


def takes_videos(config: Any) -> bool:
    """Tell whether a model takes videos here."""
    return config is not None and config.model_type in _PROCESSORS


def open_video_processor(
    folder: str | os.PathLike[str], config: Any, tokenizer: Any, settings: Mapping[str, Any] | None = None
) -> VideoProcessor:
    """Return the video processor of the checkpoint in `folder`.

    Args:
        config: the model's config, of transformers.
        tokenizer: the model's tokenizer, of transformers; it knows the placeholder's text.
        settings: of the engine, in place of the checkpoint's.

    Raises:
        ValueError: the model takes no videos here, or its files contradict each other.
    """
    if not takes_videos(config):
        raise ValueError(f"model_type={config.model_type!r} takes no videos; known: {', '.join(_PROCESSORS)}")
    kind = _kind_of(config)
    given = kind.plain(settings or {}, NAME)
    Sampling().given(given, NAME)  # checks it, while its name is known
    number, rate = (given.get(name) is not None for name in ("num_frames", "fps"))
    left = {*kind.unread, *(["fps"] if number else ()), *(["num_frames"] if rate else ())}
    plain = kind.plain(_settings_in(Path(folder)), "the video processor's file")
    of_file = {name: value for name, value in plain.items() if name not in left}
    found = _with_settings(kind, of_file, given)
    made = kind(found, config, kind.placeholder_in(config, tokenizer), tokenizer)
    made.bounded_by_engine(given)
    return made


def settings_of_videos(config: Any) -> tuple[str, ...]:
    """Return the settings that a model's processor of videos has, and none of images; see `VideoProcessor.own`."""
    return _kind_of(config).own if takes_videos(config) else ()


def _kind_of(config: Any) -> type[VideoProcessor]:
    kind: type[VideoProcessor] = pkgutil.resolve_name(_PROCESSORS[config.model_type])
    return kind


def _with_settings(kind: type[VideoProcessor], of_file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's settings, replaced by those of an engine except the ones that only images have.

    Raises:
        ValueError: see `jpaged.processor_settings.replaced`.
    """
    frames = {name: given[name] for name in SETTINGS if name in given}  # `Sampling.given` checks these
    has = {**dict.fromkeys(kind.own), **kind.defaults}
    has |= {name: value for name, value in of_file.items() if value is not None}
    pixels = BOUNDS_OF_PIXELS if counts_pixels(has.get("size")) else {}
    older = {name: has.pop(name) for name in pixels if has.get(name)}  # else they would win over an engine's size
    known = {name: value for name, value in given.items() if name not in SETTINGS and name in (has.keys() | pixels)}
    return {**replaced(replaced(has, older, of_request=False), known, of_request=False), **frames}


def _settings_in(folder: Path) -> dict[str, Any]:
    """Return the settings of the first file that has some of videos, or else of images."""
    return next(settings_of(folder, *_FILES), {})
