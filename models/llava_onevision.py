"""LLaVA-OneVision (Li et al., 2024): Qwen2 reads SigLIP's vectors of a picture's overview and of its tiles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from jpaged.model_api import BuildContext, ImageGroup, WeightSource

from .decoder import check_model_type
from .llama import Llama
from .vision import LlavaOnevisionProjector, SiglipVision


class LlavaOnevision(Llama):
    """`jpaged.model_api.CausalLM` and `TakesImages`; `config` is a Hugging Face ``LlavaOnevisionConfig``."""

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("llava_onevision",))
        if config.vision_config.model_type != "siglip_vision_model":
            raise ValueError(f"vision_config.model_type={config.vision_config.model_type!r} is not siglip_vision_model")
        super().__init__(config.text_config, build)
        self.image_group = ImageGroup("images", (), config.text_config.hidden_size, np.dtype(build.dtype).name)
        self.layer_groups = (*self.layer_groups, self.image_group)
        found = re.fullmatch(r"anyres_max_(\d+)", config.vision_aspect_ratio)
        if found is None:
            raise ValueError(f"vision_aspect_ratio={config.vision_aspect_ratio!r} is not of the form 'anyres_max_9'")
        tile = config.vision_config.image_size
        self.most_tiles = 1 + max((height // tile) * (width // tile) for height, width in config.image_grid_pinpoints)
        self.most_full = min(self.most_tiles - 1, int(found[1]))
        self.encoder_parts = ("vision", "projector")
        self.vision = SiglipVision(config.vision_config, build, final_norm=False)
        self.projector = LlavaOnevisionProjector(config, build)

    def encode(self, arrays: Mapping[str, Array]) -> Float[Array, "images features embed"]:
        """See `jpaged.model_api.TakesImages`.

        Args:
            arrays: ``pixel_values`` [images, tiles, channels, height, width]; ``pack_rows`` and ``pack_weights``
                [images, tokens, 4], see `LlavaOnevisionProjector.pack`.
        """
        pixels = arrays["pixel_values"]
        tiles = self.projector(self.vision(pixels.reshape(-1, *pixels.shape[2:])))
        tiles = tiles.reshape(*pixels.shape[:2], *tiles.shape[1:])
        return jax.vmap(self.projector.pack)(tiles, arrays["pack_rows"], arrays["pack_weights"])

    def padded(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Pad tiles and tokens to powers of two: pictures have many shapes, and each would be compiled."""
        return {name: _to_power_of_two(array) for name, array in arrays.items()}

    def examples(self) -> Iterator[tuple[Mapping[str, np.ndarray], int]]:
        """Yield the shape of an image that is not alone, and the largest of one that is."""
        side = self.vision.positions.shape[0]
        for tiles, tokens in ((1, side + 1), (self.most_tiles, side * (self.most_full + 2))):
            arrays = {
                "pixel_values": np.zeros((tiles, *self.vision.image_shape), np.float32),
                "pack_rows": np.zeros((tokens, 4), np.int32),
                "pack_weights": np.zeros((tokens, 4), np.float32),
            }
            yield self.padded(arrays), tokens

    def weights(self) -> Iterator[WeightSource]:
        yield from super().weights()
        yield from self.vision.weights(("vision",), "vision_tower")
        yield from self.projector.weights(("projector",), "multi_modal_projector", "image_newline")


def _to_power_of_two(array: np.ndarray) -> np.ndarray:
    missing = (1 << (len(array) - 1).bit_length()) - len(array)
    return np.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1)))
