"""Makes the arrays that a model's vision encoder takes of a video, in NumPy and Pillow.

A family is a row of `_PROCESSORS`. Each group of frames that its encoder takes together is an item of the prompt, so
that two prompts with the same beginning of a video share it.
"""

from __future__ import annotations

import hashlib
import json
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float32, UInt8

from jpaged.images import anyres
from jpaged.images.clips import Clip
from jpaged.images.frames import Sampler, Sampling, evenly
from jpaged.images.pixels import pillow
from jpaged.images.processors import PreparedImage
from jpaged.images.prompts import Expansion, Placeholder, expansion

_FILES = ("video_preprocessor_config.json", "preprocessor_config.json")
_FRAMES_OF_FILES = 32
"""Frames that are taken of a file whose checkpoint does not say how many."""


@dataclass(frozen=True)
class Scaling:
    """How pixels become numbers: sides by a filter of Pillow's, then ``(pixel * factor - mean) / std``.

    Attributes:
        resample: the filter's number.
        factor: None = pixels stay 0 to 255.
        mean, std: of each colour; None = nothing is subtracted or divided.
    """

    resample: int
    factor: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Scaling:
        """Read the settings of a processor's file."""
        normal = settings["do_normalize"]
        return cls(
            int(settings["resample"]),
            float(settings["rescale_factor"]) if settings["do_rescale"] else None,
            tuple(settings["image_mean"]) if normal else None,
            tuple(settings["image_std"]) if normal else None,
        )

    def apply(
        self, frames: UInt8[np.ndarray, "frames height width 3"], size: tuple[int, int]
    ) -> Float32[np.ndarray, "frames 3 rows columns"]:
        """Return frames of (height, width) `size` as the encoder takes them."""
        image_module = pillow()
        resized = [
            np.asarray(image_module.fromarray(frame).resize((size[1], size[0]), self.resample), np.float32)
            if frame.shape[:2] != size
            else frame.astype(np.float32)
            for frame in frames
        ]
        pixels = np.stack(resized)
        if self.factor is not None:
            pixels = (pixels * np.float64(self.factor)).astype(np.float32)
        if self.mean is not None and self.std is not None:
            pixels = (pixels - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


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
        self.scaling = Scaling.of(self.settings)
        shown = {name: value for name, value in self.settings.items() if name not in Sampling.__dataclass_fields__}
        named = {"family": config.model_type, "processor": shown}
        self._name = json.dumps(named, sort_keys=True, default=str).encode()

    def of_files(self, sampling: Sampling) -> Sampling:
        """Return how a video of a file is sampled, whose frames were not chosen by its caller."""
        if sampling.num_frames is None and sampling.fps is None:
            return replace(sampling, num_frames=_FRAMES_OF_FILES)
        return sampling

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

    Arrays: those of a picture; see `jpaged.images.processors.LlavaOnevisionImageProcessor`.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": (0.48145466, 0.4578275, 0.40821073),
        "image_std": (0.26862954, 0.26130258, 0.27577711),
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": 384, "width": 384},
    }
    _TOGETHER = 8
    """Frames of a group: few enough for a step, and a power of two, as their arrays are padded to."""

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

    @cached_property
    def _pooled(self) -> int:
        return -(-self._side // 2)

    def groups(self, clip: Clip) -> list[FrameGroup]:
        number, each = len(clip.frames), self._pooled**2
        starts = range(0, number, self._TOGETHER)
        found = [
            FrameGroup(first, last := min(first + self._TOGETHER, number), (last - first) * each) for first in starts
        ]
        return [*found[:-1], replace(found[-1], tokens=found[-1].tokens + 1, ends=True)]

    def prepare(self, clip: Clip, group: FrameGroup) -> PreparedImage:
        pixels = self.scaling.apply(clip.frames[group.first : group.last], (self._tile, self._tile))
        rows, weights = anyres.pooling(group.last - group.first, self._side, self._pooled, newline=group.ends)
        return PreparedImage({"pixel_values": pixels, "pack_rows": rows, "pack_weights": weights}, len(rows))


_PROCESSORS = {
    **dict.fromkeys(("gemma4", "gemma4_unified"), "jpaged.images.gemma4:Gemma4VideoProcessor"),
    "llava_onevision": f"{__name__}:LlavaOnevisionVideoProcessor",
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "jpaged.images.qwen_videos:Qwen3VideoProcessor"
    ),
}
"""The processor's class by ``config.model_type``; named, as a family's own module imports this one."""


def takes_videos(config: Any) -> bool:
    """Tell whether a model takes videos here."""
    return config is not None and config.model_type in _PROCESSORS


def open_video_processor(
    folder: str | Path, config: Any, tokenizer: Any, settings: Mapping[str, Any] | None = None
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
    token = config.video_token_id
    text = "" if tokenizer is None else tokenizer.convert_ids_to_tokens(token) or ""
    of_file, given = _settings_in(Path(folder)), dict(settings or {})
    if isinstance(of_file.get("size"), Mapping) and isinstance(given.get("size"), Mapping):
        given["size"] = {**of_file["size"], **given["size"]}  # as of images
    found = {**of_file, **given}
    kind: type[VideoProcessor] = pkgutil.resolve_name(_PROCESSORS[config.model_type])
    return kind(found, config, Placeholder(token, text, token, text, modality="video"), tokenizer)


def _settings_in(folder: Path) -> dict[str, Any]:
    """Return the settings of the first file that has some of videos, or else of images."""
    whole = _json(folder / "processor_config.json")
    if isinstance(whole.get("video_processor"), dict):
        return whole["video_processor"]
    return next((found for name in _FILES if (found := _json(folder / name))), {})


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
