"""Cuts videos into the patches that the towers of Qwen's families take.

Each pair of frames is an item: a tower's patches see those of their own pair only. With Qwen3-VL the prompt has the
time of each pair; with Qwen2-VL and Qwen2.5-VL all pairs follow one another, and the axis of time says when each is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from jpaged.images.clips import Clip
from jpaged.images.frames import UNKNOWN_FPS, Sampler, ends_included, evenly_in_patches, size_within, times_of_patches
from jpaged.images.pixels import resized
from jpaged.images.processors import PreparedImage
from jpaged.images.prompts import Expansion, Placeholder
from jpaged.images.qwen import OF_CLIP, QwenImageProcessor
from jpaged.images.videos import FrameGroup, VideoProcessor

_MOST_PLACE = 1 << 30
"""Positions are 32 bits."""


class QwenVideoProcessor(VideoProcessor):
    """Holds what Qwen's families have in common. Arrays: see `jpaged.images.qwen.QwenImageProcessor`."""

    pictures: ClassVar[type[QwenImageProcessor]] = QwenImageProcessor

    def __init__(
        self, settings: Mapping[str, Any], config: Any, placeholder: Placeholder, tokenizer: Any = None
    ) -> None:
        super().__init__(settings, config, placeholder, tokenizer)
        self._pictures = self.pictures(self.settings, config, placeholder)

    @property
    def most_features(self) -> int | None:
        settings = self._pictures.settings
        return settings.most_squares(settings.temporal)

    def size(self, clip: Clip) -> tuple[int, int]:
        """Return the height and width that all frames get: their pixels are bounded together."""
        settings = self._pictures.settings
        return size_within(
            clip.size,
            len(clip.frames),
            factor=settings.square,
            least=settings.least,
            most=settings.most,
            patch=settings.temporal,
        )

    def groups(self, clip: Clip) -> list[FrameGroup]:
        settings, number = self._pictures.settings, len(clip.frames)
        size = self.size(clip) if settings.resizes else settings.resized(*clip.size)
        tokens = size[0] // settings.square * (size[1] // settings.square)
        firsts = range(0, number, settings.temporal)
        return [FrameGroup(first, min(first + settings.temporal, number), tokens, size=size) for first in firsts]

    def prepare(self, clip: Clip, group: FrameGroup) -> PreparedImage:
        assert group.size is not None
        frames, resample = clip.frames[group.first : group.last], self._pictures.settings.resample
        return self._pictures.prepare_frames(np.stack([resized(frame, group.size, resample) for frame in frames]))


class Qwen2VideoProcessor(QwenVideoProcessor):
    """Qwen2-VL and Qwen2.5-VL: the frames of a video follow one another; bounds on pixels are those of each frame.

    The axis of time counts pairs of frames (Qwen2-VL), or ``tokens_per_second`` (Qwen2.5-VL).
    """

    own: ClassVar[tuple[str, ...]] = ("cap_pixels_per_frame", "max_video_tokens")

    defaults: ClassVar[Mapping[str, Any]] = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "do_sample_frames": False,
        "image_mean": OF_CLIP[0],
        "image_std": OF_CLIP[1],
        "max_video_tokens": 128000,
        "merge_size": 2,
        "patch_size": 14,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "temporal_patch_size": 2,
    }

    def __init__(
        self, settings: Mapping[str, Any], config: Any, placeholder: Placeholder, tokenizer: Any = None
    ) -> None:
        super().__init__(settings, config, placeholder, tokenizer)
        self.sampler = partial(evenly_in_patches, patch=self._pictures.settings.temporal)
        self._per_second = getattr(config.vision_config, "tokens_per_second", None)

    @property
    def most_features(self) -> int | None:
        return self._pictures.settings.most_squares()

    def size(self, clip: Clip) -> tuple[int, int]:
        settings, most = self._pictures.settings, self._pictures.settings.most
        if self.settings.get("cap_pixels_per_frame"):  # an even share of a whole video's pixels
            whole = int(self.settings["max_video_tokens"] * settings.square**2 * 0.9)
            share = whole * settings.temporal // len(clip.frames)
            most = max(min(most, share), int(settings.least * 1.05))
        return size_within(clip.size, 1, factor=settings.square, least=settings.least, most=most, counts_time=False)

    def groups(self, clip: Clip) -> list[FrameGroup]:
        found = super().groups(clip)
        if (last := self._place(clip, found[-1])) > _MOST_PLACE:
            raise ValueError(
                f"a video of {len(clip.frames)} frames, of {clip.total} at fps={clip.fps}, has its last ones at place "
                f"{last:g} of the axis of time, the limit is {_MOST_PLACE}"
            )
        return [*found[:-1], replace(found[-1], ends=True)]

    def digest(self, clip: Clip, group: FrameGroup) -> bytes:
        """Name the place in time too, as keys depend on it."""
        state = hashlib.blake2b(digest_size=32, person=b"jpaged-moment")
        state.update(super().digest(clip, group) + repr(self._moment(clip, group)).encode())
        return state.digest()

    def prepare(self, clip: Clip, group: FrameGroup) -> PreparedImage:
        made = super().prepare(clip, group)
        assert made.offsets is not None
        offsets = made.offsets.copy()
        offsets[:, 0] += self._moment(clip, group)
        # All begin where the first does; the last one moves the text.
        return replace(made, offsets=offsets, advance=made.advance if group.ends else 0)

    def _moment(self, clip: Clip, group: FrameGroup) -> int:
        return int(self._place(clip, group))

    def _place(self, clip: Clip, group: FrameGroup) -> float:
        """Return a group's place on the axis of time; computed in float32, as transformers does."""
        temporal = self._pictures.settings.temporal
        number = group.first // temporal
        if self._per_second is None:
            return number
        rate = UNKNOWN_FPS if clip.fps is None else len(clip.indices) / clip.total * clip.fps
        apart = np.float32(self._per_second) * np.float32(temporal / rate)
        return float(np.float32(number) * apart)


class Qwen3VideoProcessor(QwenVideoProcessor):
    """Qwen3-VL and Qwen3.5: each pair of frames is a picture of its own, after its time in seconds."""

    own: ClassVar[tuple[str, ...]] = ("cap_pixels_per_frame",)

    defaults: ClassVar[Mapping[str, Any]] = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "do_sample_frames": True,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "merge_size": 2,
        "patch_size": 16,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "temporal_patch_size": 2,
    }
    sampler: Sampler = staticmethod(ends_included)

    def __init__(
        self, settings: Mapping[str, Any], config: Any, placeholder: Placeholder, tokenizer: Any = None
    ) -> None:
        rate = {} if settings.get("num_frames") or settings.get("fps") else {"fps": 2}
        super().__init__({**rate, **settings}, config, placeholder, tokenizer)
        if self.settings.get("cap_pixels_per_frame"):
            raise ValueError("a video processor with cap_pixels_per_frame=True is not supported")
        self._around = config.vision_start_token_id, config.vision_end_token_id
        # Chat templates put a video between the marks that each pair of frames has, as transformers 4.57 and vLLM know.
        texts = ("", "") if tokenizer is None else tuple(tokenizer.convert_ids_to_tokens(list(self._around)))
        self.placeholder = replace(placeholder, marks=self._around, marks_text=texts)

    def expansion(self, clip: Clip) -> Expansion:
        if self.tokenizer is None:
            raise ValueError("a video has the times of its frames, and the model has no tokenizer for them")
        times = times_of_patches(clip.indices, clip.fps, self._pictures.settings.temporal)
        start, end = self._around
        begin, stop = self.tokenizer.convert_ids_to_tokens([start, end])
        text, ids = "", list[int]()
        for time, group in zip(times, self.groups(clip), strict=True):
            said = f"<{time:.1f} seconds>"
            text += f"{said}{begin}{self.placeholder.image_text * group.tokens}{stop}"
            of_time = self.tokenizer.encode(said, add_special_tokens=False)
            ids += [*of_time, start, *[self.placeholder.image_token] * group.tokens, end]
        return Expansion(text, tuple(ids))
