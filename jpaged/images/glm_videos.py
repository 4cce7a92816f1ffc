"""Cuts videos into the patches of GLM-4.1V and those after it; a time follows each pair of frames in the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from jpaged.images.clips import Clip
from jpaged.images.frames import UNKNOWN_FPS, Indices, Sampling, evenly, of_each_second, sparser_when_long
from jpaged.images.glm import GlmImageProcessor
from jpaged.images.prompts import Expansion, Placeholder
from jpaged.images.qwen import OF_CLIP
from jpaged.images.qwen_videos import QwenVideoProcessor


class GlmVideoProcessor(QwenVideoProcessor):
    """GLM-4.1V and GLM-4.5V: each pair of frames is a picture of its own, before its time in whole seconds."""

    pictures = GlmImageProcessor
    defaults: ClassVar[Mapping[str, Any]] = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "do_sample_frames": True,
        "image_mean": OF_CLIP[0],
        "image_std": OF_CLIP[1],
        "max_duration": 300,
        "merge_size": 2,
        "patch_size": 14,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000},
        "temporal_patch_size": 2,
    }

    unread: ClassVar[tuple[str, ...]] = ("num_frames",)
    own: ClassVar[tuple[str, ...]] = ("max_duration",)
    bounded_below: ClassVar[bool] = False
    usual: ClassVar[Mapping[str, Any]] = {"fps": 2}
    """Settings where neither a rate nor a number of frames is given."""

    def __init__(
        self, settings: Mapping[str, Any], config: Any, placeholder: Placeholder, tokenizer: Any = None
    ) -> None:
        usual = {} if settings.get("num_frames") or settings.get("fps") else self.usual
        super().__init__({**usual, **settings}, config, placeholder, tokenizer)
        image = config.image_token_id
        text = "" if tokenizer is None else tokenizer.convert_ids_to_tokens(image)
        self.placeholder = replace(placeholder, image_token=image, image_text=text)
        self._around = config.image_start_token_id, config.image_end_token_id

    def sampler(self, total: int, fps: float | None, sampling: Sampling, /) -> Indices:
        if sampling.num_frames is not None:
            return evenly(total, fps, sampling)
        found, most = self._frames(total, fps, sampling), sampling.max_frames
        if most is None or len(found) <= most:
            return found
        number = most // 2 * 2 or 1  # pairs
        return found[np.arange(number) * len(found) // number]

    def _frames(self, total: int, fps: float | None, sampling: Sampling) -> Indices:
        return of_each_second(total, fps, sampling, longest=self.settings["max_duration"])

    def said(self, seconds: float) -> str:
        """Return how the prompt has the time of a pair of frames."""
        return str(int(seconds))

    def expansion(self, clip: Clip) -> Expansion:
        if self.tokenizer is None:
            raise ValueError("a video has the times of its frames, and the model has no tokenizer for them")
        start, end = self._around
        begin, stop = self.tokenizer.convert_ids_to_tokens([start, end])
        text, ids = "", list[int]()
        for group in self.groups(clip):
            said = self.said(clip.indices[group.first] / (clip.fps or UNKNOWN_FPS))
            text += f"{begin}{self.placeholder.image_text * group.tokens}{stop}{said}"
            of_time = self.tokenizer.encode(said, add_special_tokens=False)
            ids += [start, *[self.placeholder.image_token] * group.tokens, end, *of_time]
        return Expansion(text, tuple(ids))


class Glm46VideoProcessor(GlmVideoProcessor):
    """GLM-4.6V: times have a tenth, and a longer video is shown fewer frames a second."""

    unread: ClassVar[tuple[str, ...]] = ("num_frames", "fps")
    usual: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self, settings: Mapping[str, Any], config: Any, placeholder: Placeholder, tokenizer: Any = None
    ) -> None:
        super().__init__(settings, config, placeholder, tokenizer)
        self._check(self.sampling)

    def of_files(self, sampling: Sampling) -> Sampling:
        return sampling

    @staticmethod
    def _check(sampling: Sampling) -> None:
        if sampling.fps is not None:
            raise ValueError(
                f"fps={sampling.fps}: how many frames of a second the model is shown depends on the video's length; "
                "num_frames says how many of all"
            )

    def _frames(self, total: int, fps: float | None, sampling: Sampling) -> Indices:
        self._check(sampling)
        return sparser_when_long(total, fps, sampling, patch=self._pictures.settings.temporal)

    def said(self, seconds: float) -> str:
        return f"{seconds:.1f} seconds"
