"""Cuts pictures into the patches of PaddleOCR-VL, each of one frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from jpaged.images.frames import check_oblong
from jpaged.images.qwen import PatchSettings, QwenImageProcessor


class PaddleOCRPatches(PatchSettings):
    """Says how pictures become patches; the defaults are those of transformers' processor."""

    default_size: ClassVar[Mapping[str, int]] = {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536}
    default_temporal: ClassVar[int] = 1

    def resized(self, height: int, width: int) -> tuple[int, int]:
        given = height, width
        if self.resizes:  # a side below a square becomes one, before the shape is looked at
            if height < self.square:
                height, width = self.square, round(width * self.square / height)
            if width < self.square:
                height, width = round(height * self.square / width), self.square
            check_oblong((height, width), given)
        return super().resized(height, width)


class PaddleOCRImageProcessor(QwenImageProcessor):
    """PaddleOCR-VL. Arrays: see `QwenImageProcessor`."""

    patches = PaddleOCRPatches
