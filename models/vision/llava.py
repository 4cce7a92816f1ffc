"""LLaVA (Liu et al., 2023), LLaVA-NeXT and LLaVA-OneVision (Li et al., 2024), which read SigLIP's or CLIP's vectors.
Checkpoints of LLaVA's type with Pixtral's tower, as Pixtral 12B, are that family's.

A picture of the later two is an overview and tiles: features are put together from them by `jpaged.images.anyres`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import TENSOR_AXIS, BuildContext, RowArray, WeightSource

from .. import weights as convert
from ..layers import ACTIVATIONS, check_activation
from ..linear import Linear
from ..parameters import random_param
from .family import OneOfTowers, VisionFamily
from .pixtral import MISTRAL3
from .siglip import PREFIXES, TILES, LearnedTower, ProjectedTower, row_layout
from .tower import as_floats

_TOWERS = ("siglip_vision_model", "clip_vision_model")


class LlavaProjector(nnx.Module):
    """Two layers, and a choice of patches; a newline may end each row of a picture.

    Parameters: up [states, columns], down [columns, embed], newline [embed].

    Args:
        states: how many of the tower's states a patch has side by side.
        newline: whether there is one.
    """

    def __init__(self, config: Any, states: int, build: BuildContext, *, newline: bool):
        width, bias = config.text_config.hidden_size, config.multimodal_projector_bias
        self.columns = convert.Padded(width, build.tensor_parallel)
        columns, inputs = self.columns.size, config.vision_config.hidden_size * states
        self.up = Linear(inputs, columns, build, partition=P(None, TENSOR_AXIS), bias=bias)
        self.down = Linear(columns, width, build, partition=P(TENSOR_AXIS, None), bias=bias)
        self.newline = random_param(build, (width,)) if newline else None
        self.activation = check_activation(config.projector_hidden_act, "projector_hidden_act")

    def __call__(self, x: Float[Array, "patches states"], row: Mapping[str, Array]) -> Float[Array, "features embed"]:
        """Return weighted sums of projected patches, summed in float32; a row's ``takes`` and ``shares`` [features,
        taps] say which, -1 being the newline."""
        live, takes, shares = row[TILES][-1], row["takes"], row["shares"]
        projected = self.down(ACTIVATIONS[self.activation](self.up(x, live)), live)
        if self.newline is not None:
            projected, takes = jnp.concatenate([self.newline[...][None], projected]), takes + 1
        taken = jnp.take(projected, takes, axis=0, mode="clip").astype(jnp.float32)
        return (taken * shares[..., None]).sum(axis=1).astype(projected.dtype)

    def weights(self, path: tuple[str, ...]) -> Iterator[WeightSource]:
        """Yield the sources of all parameters."""
        name, columns, width = "multi_modal_projector", self.columns, self.down.weight.shape[-1]
        up, down = convert.linear(self.up.weight.shape[0], columns), convert.linear(columns, width)
        bias = convert.pad_rows(columns)
        for source in self.up.weights((*path, "up"), (f"{name}.linear_1",), None, up, bias, may_quantise=False):
            yield as_floats(source)
        for source in self.down.weights((*path, "down"), (f"{name}.linear_2",), None, down, may_quantise=False):
            yield as_floats(source)
        if self.newline is not None:
            yield WeightSource((*path, "newline"), ("image_newline",), convert.as_stored, P(None))


class LlavaVision(ProjectedTower):
    """A tower and the projector; `config` is a Hugging Face ``LlavaConfig`` or that of a later family."""

    def __init__(self, config: Any, build: BuildContext):
        vision = config.vision_config
        if vision.model_type not in _TOWERS:
            raise ValueError(f"vision_config.model_type={vision.model_type!r} is not one of {', '.join(_TOWERS)}")
        reads = config.vision_feature_layer
        reads = (reads,) if isinstance(reads, int) else tuple(reads)
        tiles, spare, taps = 1, 0, 1
        grids = getattr(config, "image_grid_pinpoints", None)
        if grids is not None:
            size = vision.image_size
            tiles = 1 + max((height // size) * (width // size) for height, width in grids)
            spare = 1 + size // vision.patch_size  # a newline for each row of a tile, and one after the overview
            taps = 4 if re.fullmatch(r"anyres_max_\d+", getattr(config, "vision_aspect_ratio", "")) else 1
        features = RowArray("takes", (taps,), "int32", numbers_patches=True), RowArray("shares", (taps,), "float32")
        super().__init__(
            LearnedTower(vision, build, reads=reads),
            LlavaProjector(config, len(reads), build, newline=grids is not None),
            row_layout(vision, tiles=None if grids is None else tiles, features=features, spare=spare),
        )


_OF_TILES = VisionFamily(LlavaVision, "jpaged.images.tiles:LlavaImageProcessor", PREFIXES)
LLAVA = OneOfTowers(dict.fromkeys(_TOWERS, _OF_TILES) | {"pixtral": MISTRAL3})
LLAVA_NEXT = VisionFamily(LlavaVision, "jpaged.images.tiles:LlavaNextImageProcessor", PREFIXES)
LLAVA_ONEVISION = VisionFamily(LlavaVision, "jpaged.images.tiles:LlavaOnevisionImageProcessor", PREFIXES)
