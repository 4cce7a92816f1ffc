"""Cuts pictures into the patches of GLM-4.1V and those after it, whose bounds on pixels count a patch's frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from jpaged.images.frames import size_within
from jpaged.images.qwen import PatchSettings, QwenImageProcessor


class GlmPatches(PatchSettings):
    """Says how pictures become patches; the defaults are those of transformers' GLM-4.1V processor."""

    default_size: ClassVar[Mapping[str, int]] = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}

    def most_squares(self, frames: int = 1) -> int | None:
        return super().most_squares(max(frames, self.temporal))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        if not self.resizes:
            return super().resized(height, width)
        return size_within(
            (height, width),
            self.temporal,
            factor=self.square,
            least=self.least,
            most=self.most,
            patch=self.temporal,
            what="a picture",
        )


class GlmImageProcessor(QwenImageProcessor):
    """GLM-4.1V, GLM-4.5V and GLM-4.6V. Arrays: see `QwenImageProcessor`."""

    patches = GlmPatches
