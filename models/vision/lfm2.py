"""LFM2-VL's tower: SigLIP 2 of pictures of any shape (NaFlex; Tschannen et al., 2025)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import AttendWithinSegments, BuildContext, SegmentKind, WeightSource

from .. import weights as convert
from ..attention import ProjectionNames
from ..dense import MLPSpec
from ..encoder import EncoderNames, EncoderSpec
from ..layers import LayerNorm, check_activation
from ..parameters import random_param
from ..stack import LayerKind, Shared
from .family import VisionFamily
from .tower import PixelStem, SquareMerger, layer_weights, layers_of, row_of_patches, within

PROJECTOR_EPS = 1e-5
NAMES = EncoderNames(
    layers="vision_tower.encoder.layers",
    attention="self_attn",
    projections=ProjectionNames(out="out_proj"),
    attention_norm="layer_norm1",
    mlp_norm="layer_norm2",
)
PROCESSOR = "jpaged.images.lfm2:Lfm2ImageProcessor"
PREFIXES = (
    ("model.vision_tower.vision_model.", "vision_tower."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)


class Lfm2Vision(nnx.Module):
    """SigLIP 2 and what leads to the language model; `config` is the whole model's, with ``vision_config``.

    Parameters: stem; positions [side * side, embed], a table of a square grid, which is shrunk or stretched to each
    picture's; layers; norm; project.
    """

    levels = 1

    def __init__(self, config: Any, build: BuildContext):
        vision, merge = config.vision_config, config.downsample_factor
        embed, channels, patch = vision.hidden_size, vision.num_channels, vision.patch_size
        self.layout = row_of_patches(channels, patch**2, merge**2, SegmentKind("parts", usual=64))
        self.stem = PixelStem(channels, patch**2, embed, build, bias=True)
        self.side = math.isqrt(vision.num_patches)
        self.positions = random_param(build, (self.side**2, embed))
        spec = EncoderSpec(
            embed,
            vision.num_attention_heads,
            MLPSpec(vision.intermediate_size, vision.hidden_act, gated=False, names=("fc1", "fc2"), bias=True),
            vision.layer_norm_eps,
            (LayerKind("parts"),) * vision.num_hidden_layers,
            norm_before=True,
            names=NAMES,
        )
        self.layers = layers_of(spec, build)
        self.norm = LayerNorm(embed, vision.layer_norm_eps, build)
        square = LayerNorm(embed * merge**2, PROJECTOR_EPS, build) if config.projector_use_layernorm else None
        self.project = SquareMerger(
            square,
            embed,
            merge**2,
            config.get_text_config().hidden_size,
            build,
            activation=check_activation(config.projector_hidden_act, "projector_hidden_act"),
            of_squares=True,
            columns=config.projector_hidden_size,
            bias=config.projector_bias,
        )

    def __call__(self, row: Mapping[str, Array], attend: AttendWithinSegments) -> Float[Array, "features embed"]:
        """Return the features of a row."""
        live = row["parts"][-1]
        x = self.stem(row["pixels"], row["scale"], row["shift"], live)
        x = x + smoothed(self.positions[...], self.side, row["places"].astype(jnp.int32)).astype(x.dtype)
        x, _ = self.layers(x, Shared({"parts": None}, live), None, within(attend))
        return self.project(self.norm(x), live // self.layout.merge)

    def weights(self) -> Iterator[WeightSource]:
        """Yield the sources of all parameters."""
        name, channels = "vision_tower.embeddings.patch_embedding", self.stem.channels

        def by_channel(matrix: np.ndarray) -> np.ndarray:
            """Return the inputs channel by channel, which the checkpoint has number by number of a patch."""
            return matrix.reshape(len(matrix), -1, channels).transpose(2, 1, 0).reshape(-1, len(matrix))

        yield from self.stem.project.weights(("stem", "project"), (name,), None, by_channel, may_quantise=False)
        table = ("vision_tower.embeddings.position_embedding.weight",)
        yield WeightSource(("positions",), table, convert.as_stored, P(None, None))
        yield from layer_weights(self.layers, (), NAMES.layers)
        yield from self.norm.weights(("norm",), "vision_tower.post_layernorm")
        layers = [f"multi_modal_projector.linear_{number}" for number in (1, 2)]
        yield from self.project.weights(("project",), norm="multi_modal_projector.layer_norm", layers=layers)

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """Return a source's target, see `jpaged.model_api.CausalLM.locate`."""
        return self.layers.locate(source, "layers")


def smoothed(
    table: Float[Array, "squares embed"], side: int, places: Int[Array, "patches 4"]
) -> Float[Array, "patches embed"]:
    """Return each patch's entry of a table of `side` x `side` places that is resized to the grid of its picture.

    As ``interpolate(mode="bilinear", antialias=True)`` of torch does it: a grid that is smaller than the table averages
    over as much of it as a patch covers.

    Args:
        places: a patch's row and column, and the rows and columns that there are.
    """
    step = side / jnp.maximum(places[:, 2:], 1)
    centre = (places[:, :2] + 0.5) * step - 0.5
    distance = jnp.abs(jnp.arange(side) - centre[..., None])
    share = jnp.maximum(1 - distance / jnp.maximum(step, 1)[..., None], 0)
    share = share / jnp.maximum(share.sum(-1, keepdims=True), 1e-6)
    both = (share[:, 0, :, None] * share[:, 1, None, :]).reshape(len(places), -1)
    return jnp.matmul(both, table.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


LFM2_VL = VisionFamily(Lfm2Vision, PROCESSOR, PREFIXES)
