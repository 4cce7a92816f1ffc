"""Gemma 3 with eyes (Gemma Team, 2025): SigLIP's vectors of an image, averaged in squares, stand among the tokens.

The tokens of an image see each other, in local layers as far back as the window reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jpaged.model_api import AttentionGroup, BuildContext, ImageGroup, WeightSource

from .decoder import check_model_type
from .gemma import Gemma
from .vision import Gemma3Projector, SiglipVision


class Gemma3(Gemma):
    """`jpaged.model_api.CausalLM` and `TakesImages`; `config` is a Hugging Face ``Gemma3Config``."""

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("gemma3",))
        if self.encodes(config.text_config):
            raise ValueError("use_bidirectional_attention=True is not supported with images: attention is causal")
        super().__init__(config.text_config, build)
        self.image_group = ImageGroup(
            "images", (), config.text_config.hidden_size, np.dtype(build.dtype).name, whole=True
        )
        texts = (replace(g, sees_images=True) for g in self.layer_groups if isinstance(g, AttentionGroup))
        self.layer_groups = (*texts, self.image_group)
        self.encoder_parts = ("vision", "projector")
        self.vision = SiglipVision(config.vision_config, build, final_norm=True)
        self.projector = Gemma3Projector(config, build)

    def encode(self, arrays: Mapping[str, Array]) -> Float[Array, "images features embed"]:
        """See `jpaged.model_api.TakesImages`; the one array is ``pixel_values``, [images, channels, height, width]."""
        return self.projector(self.vision(arrays["pixel_values"]))

    def padded(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return the arrays as they are: all images have one shape."""
        return arrays

    def examples(self) -> Iterator[tuple[Mapping[str, np.ndarray], int]]:
        """Yield the one shape."""
        yield {"pixel_values": np.zeros(self.vision.image_shape, np.float32)}, self.projector.side**2

    def weights(self) -> Iterator[WeightSource]:
        yield from super().weights()
        yield from self.vision.weights(("vision",), "vision_tower")
        yield from self.projector.weights(("projector",), "multi_modal_projector")
