"""Gemma 3 with eyes (Gemma Team, 2025): SigLIP's vectors of an image, averaged in squares, stand among the tokens.

The tokens of an image see each other, in local layers as far back as the window reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import BuildContext, WeightSource

from .. import weights as convert
from ..layers import RMSNorm
from ..linear import Linear
from .family import VisionFamily
from .siglip import PREFIXES, TILES, LearnedTower, ProjectedTower, row_layout


class Gemma3Projector(nnx.Module):
    """Averages squares of patches, norms the averages and multiplies them."""

    def __init__(self, config: Any, build: BuildContext):
        vision, tokens = config.vision_config, config.mm_tokens_per_image
        patches, side = vision.image_size // vision.patch_size, math.isqrt(tokens)
        if side**2 != tokens or patches % side:
            raise ValueError(
                f"mm_tokens_per_image={tokens} is not a square whose side divides the {patches} patches of an image's "
                "side"
            )
        self.merge = (patches // side) ** 2
        self.norm = RMSNorm(vision.hidden_size, vision.layer_norm_eps, build, offset=1.0)
        width = config.text_config.hidden_size
        self.project = Linear(vision.hidden_size, width, build, partition=P(None, None))

    def __call__(self, x: Float[Array, "patches vision"], row: Mapping[str, Array]) -> Float[Array, "features embed"]:
        """Return a vector for each square."""
        squares = x.reshape(len(x) // self.merge, self.merge, -1)
        averages = squares.mean(axis=1, dtype=jnp.float32).astype(x.dtype)
        return self.project(self.norm(averages), row[TILES][-1] // self.merge)

    def weights(self, path: tuple[str, ...]) -> Iterator[WeightSource]:
        """Yield the sources of all parameters; the matrix is stored in the parameter's layout."""
        name = "multi_modal_projector"
        yield from self.norm.weights((*path, "norm"), f"{name}.mm_soft_emb_norm")
        stored = (f"{name}.mm_input_projection_weight",)
        yield WeightSource((*path, "project", "weight"), stored, convert.as_stored, P(None, None))


class Gemma3Vision(ProjectedTower):
    """SigLIP with its final norm, and the projector; `config` is a Hugging Face ``Gemma3Config``."""

    def __init__(self, config: Any, build: BuildContext):
        text = config.text_config
        if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None):
            raise ValueError("use_bidirectional_attention=True is not supported with images: attention is causal")
        projector = Gemma3Projector(config, build)
        tower = LearnedTower(config.vision_config, build, normed=True)
        super().__init__(tower, projector, row_layout(config.vision_config, merge=projector.merge))


GEMMA3 = VisionFamily(Gemma3Vision, "jpaged.images.tiles:Gemma3ImageProcessor", PREFIXES, whole=True)
