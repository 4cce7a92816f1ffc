"""Idefics 3 (Laurencon et al., 2024) and SmolVLM (Marafioti et al., 2025): squares of SigLIP's patches side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import BuildContext, WeightSource

from .. import weights as convert
from ..linear import Linear
from .family import VisionFamily
from .siglip import TILES, LearnedTower, ProjectedTower, row_layout
from .tower import as_floats

PREFIXES = (
    ("model.vision_model.", "vision_model."),
    ("vision_model.", "vision_model."),
    ("model.connector.", "connector."),
    ("connector.", "connector."),
)


class PixelShuffle(nnx.Module):
    """Multiplies the patches of a square, side by side."""

    def __init__(self, config: Any, build: BuildContext):
        vision = config.vision_config
        side = vision.image_size // vision.patch_size
        if side % config.scale_factor:
            raise ValueError(f"scale_factor={config.scale_factor} does not divide the {side} patches of a tile's side")
        self.merge = config.scale_factor**2
        width = config.text_config.hidden_size
        self.project = Linear(vision.hidden_size * self.merge, width, build, partition=P(None, None))

    def __call__(self, x: Float[Array, "patches vision"], row: Mapping[str, Array]) -> Float[Array, "features embed"]:
        """Return a vector for each square."""
        return self.project(x.reshape(len(x) // self.merge, -1), row[TILES][-1] // self.merge)

    def weights(self, path: tuple[str, ...]) -> Iterator[WeightSource]:
        """Yield the source of the matrix."""
        name, own = ("connector.modality_projection.proj",), convert.linear(*self.project.weight.shape)
        for source in self.project.weights((*path, "project"), name, None, own, may_quantise=False):
            yield as_floats(source)


class Idefics3Vision(ProjectedTower):
    """SigLIP with its final norm, and the projector; `config` is a Hugging Face ``Idefics3Config``."""

    def __init__(self, config: Any, build: BuildContext):
        projector = PixelShuffle(config, build)
        tower = LearnedTower(config.vision_config, build, normed=True)
        super().__init__(tower, projector, row_layout(config.vision_config, merge=projector.merge), "vision_model")


IDEFICS3 = VisionFamily(Idefics3Vision, "jpaged.images.idefics3:Idefics3ImageProcessor", PREFIXES)
