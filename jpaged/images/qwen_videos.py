"""Cuts videos into the patches that the towers of Qwen3-VL and Qwen3.5 take; the prompt has the time of each group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jpaged.images.clips import Clip
from jpaged.images.frames import Sampler, ends_included, size_within, times_of_patches
from jpaged.images.pixels import pillow
from jpaged.images.processors import PreparedImage
from jpaged.images.prompts import Expansion, Placeholder
from jpaged.images.qwen import QwenImageProcessor
from jpaged.images.videos import FrameGroup, VideoProcessor


class Qwen3VideoProcessor(VideoProcessor):
    """Qwen3-VL and Qwen3.5: each pair of frames is a picture of its own, after its time in seconds.

    Arrays: see `jpaged.images.qwen.QwenImageProcessor`.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "do_sample_frames": True,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "max_frames": 768,
        "merge_size": 2,
        "min_frames": 4,
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
        self._pictures = QwenImageProcessor(self.settings, config, placeholder)
        self._around = config.vision_start_token_id, config.vision_end_token_id

    @property
    def most_features(self) -> int | None:
        settings = self._pictures.settings
        return settings.most_squares(settings.temporal)

    def expansion(self, clip: Clip) -> Expansion:
        if self.tokenizer is None:
            raise ValueError("a video has the times of its frames, and the model has no tokenizer for them")
        times = times_of_patches(clip.indices, clip.fps, self._pictures.settings.temporal)
        start, end = self._around
        text, ids = "", list[int]()
        for time, group in zip(times, self.groups(clip), strict=True):
            said = f"<{time:.1f} seconds>"
            begin, stop = self.tokenizer.convert_ids_to_tokens([start, end])
            text += f"{said}{begin}{self.placeholder.image_text * group.tokens}{stop}"
            of_time = self.tokenizer.encode(said, add_special_tokens=False)
            ids += [*of_time, start, *[self.placeholder.image_token] * group.tokens, end]
        return Expansion(text, tuple(ids))

    def groups(self, clip: Clip) -> list[FrameGroup]:
        settings, number = self._pictures.settings, len(clip.frames)
        size = clip.size
        if settings.resizes:
            size = size_within(
                size, number, factor=settings.square, least=settings.least, most=settings.most, patch=settings.temporal
            )
        tokens = size[0] // settings.square * (size[1] // settings.square)
        firsts = range(0, number, settings.temporal)
        return [FrameGroup(first, min(first + settings.temporal, number), tokens, size=size) for first in firsts]

    def prepare(self, clip: Clip, group: FrameGroup) -> PreparedImage:
        assert group.size is not None
        frames, image_module = clip.frames[group.first : group.last], pillow()
        if clip.size != group.size:
            height, width = group.size
            resample = self._pictures.settings.resample
            frames = np.stack(
                [
                    np.asarray(image_module.fromarray(frame).resize((width, height), resample=resample))
                    for frame in frames
                ]
            )
        return self._pictures.prepare_frames(frames)
