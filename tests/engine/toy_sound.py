"""A family of a package outside: a tower for sound, its processor and its row, in one file.

A sound is given as a picture one pixel high, whose red and green bytes are a sample of 16 bits.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jpaged.images import ImageProcessor, PreparedImage, placeholder_of
from jpaged.model_api import RowArray, RowLayout, SegmentKind, WeightSource
from jpaged_models.vision.family import VisionFamily

FRAME = 8
"""Samples of a token."""


class SoundTower(nnx.Module):
    """``x = samples @ up; x + attention(x)``, within each sound; `config` is the whole model's."""

    layout = RowLayout(
        (RowArray("samples", (FRAME,), "int16"),), (RowArray("volume", (), "float32"),), (SegmentKind("sounds"),), 1
    )
    levels = 1

    def __init__(self, config: Any, build: Any):
        self.up = nnx.Param(jnp.zeros((FRAME, config.get_text_config().hidden_size), build.dtype))

    def __call__(self, row, attend):
        x = (row["samples"] * row["volume"]).astype(self.up.dtype) @ self.up[...]
        return x + attend("sounds", x[:, None, None], x[:, None], x[:, None], scale=0.5)[:, 0, 0]

    def weights(self):
        yield WeightSource(("up",), ("sound.up.weight",), np.transpose, PartitionSpec(None, None))

    def locate(self, source):
        return source.path, None


class SoundProcessor(ImageProcessor):
    """Cuts a sound into frames."""

    @classmethod
    def open(cls, folder, config, tokenizer):
        return cls(placeholder_of(config, tokenizer), {"frame": FRAME})

    def tokens(self, size, *, alone):
        return -(-size[1] // FRAME)

    def prepare(self, picture, *, alone):
        low, high = np.moveaxis(picture.pixels[0, :, :2], -1, 0).astype(np.int16)
        samples = np.pad(low + (high << 8), (0, -len(low) % FRAME)).reshape(-1, FRAME)
        count = len(samples)
        arrays = {"samples": samples, "volume": np.float32(2**-14), "sounds": np.array([count], np.int32)}
        return PreparedImage(arrays, count)


SOUND = VisionFamily(SoundTower, "toy_sound:SoundProcessor", (("sound.", "sound."),))
