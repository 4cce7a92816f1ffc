"""The tower of GLM-4.1V, GLM-4.5V and GLM-4.6V (GLM-V Team, 2025, section 2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import AttendWithinSegments, BuildContext, WeightSource

from .. import weights as convert
from ..dense import MLPSpec
from ..encoder import EncoderSpec
from ..layers import GatedMLP, LayerNorm, RMSNorm, check_activation
from ..linear import Linear, LiveRows
from ..parameters import random_param
from ..stack import LayerKind, Shared
from .family import VisionFamily
from .qwen import NAMES, PREFIXES, row_layout
from .stretched import centres, cubic, side_of, stretched
from .tower import PixelStem, as_floats, axial, layer_weights, layers_of, within

PROCESSOR = "jpaged.images.glm:GlmImageProcessor"
_MERGER_EPS = 1e-5
"""The epsilon of the merger's LayerNorm, as torch has it by default."""


class GlmMerger(nnx.Module):
    """``mlp(gelu(norm(project(x))))`` of a square's vector, the MLP being gated."""

    def __init__(self, width: int, inner: int, activation: str, build: BuildContext):
        self.project = Linear(width, width, build, partition=P(None, None), bias=False)
        self.norm = LayerNorm(width, _MERGER_EPS, build)
        self.mlp = GatedMLP(width, inner, activation, build, bias=False)

    def __call__(self, x: Float[Array, "features width"], live_rows: LiveRows) -> Float[Array, "features width"]:
        """Return a feature for each square; `live_rows` counts squares."""
        return self.mlp(jax.nn.gelu(self.norm(self.project(x, live_rows)), approximate=False), live_rows)

    def weights(self, path: tuple[str, ...], name: str) -> Iterator[WeightSource]:
        """Yield the sources of the tensors that begin with `name`."""

        def turned(matrix: Any) -> Any:
            return matrix.T

        yield from self.project.weights((*path, "project"), (f"{name}.proj",), None, turned, may_quantise=False)
        yield from self.norm.weights((*path, "norm"), f"{name}.post_projection_norm")
        yield from map(as_floats, self.mlp.weights((*path, "mlp"), name, None))


class Glm4vVision(nnx.Module):
    """The tower of GLM-4.1V and those after it; `config` is the whole model's, with ``vision_config``.

    Parameters: stem, stem_norm; positions [side * side, embed], a table of a square grid, which is stretched to each
    image's; layers, norm; down, a convolution over squares of patches; merger.
    """

    levels = 1

    def __init__(self, config: Any, build: BuildContext):
        vision = config.vision_config
        embed, width, eps = vision.hidden_size, vision.out_hidden_size, vision.rms_norm_eps
        self.layout = row_layout(vision)
        numbers = vision.temporal_patch_size * vision.patch_size**2
        self.stem = PixelStem(vision.in_channels, numbers, embed, build, bias=True)
        self.stem_norm = RMSNorm(embed, eps, build)
        self.positions = random_param(build, ((vision.image_size // vision.patch_size) ** 2, embed))
        rope = getattr(vision, "rope_parameters", None) or {}
        self.rotary = axial(embed // vision.num_heads, rope.get("rope_theta", 10000.0))
        spec = EncoderSpec(
            embed,
            vision.num_heads,
            MLPSpec(width, vision.hidden_act),
            eps,
            (LayerKind("frames"),) * vision.depth,
            norm="rms",
            norm_before=True,
            qkv_bias=vision.attention_bias,
            out_bias=False,
            rotary=(("frames", self.rotary),),
            names=NAMES,
        )
        self.layers = layers_of(spec, build)
        self.norm = RMSNorm(embed, eps, build)
        self.down = Linear(embed * self.layout.merge, width, build, partition=P(None, None), bias=True)
        activation = check_activation(vision.hidden_act, "hidden_act")
        self.merger = GlmMerger(width, vision.intermediate_size, activation, build)

    def __call__(self, row: Mapping[str, Array], attend: AttendWithinSegments) -> Float[Array, "features embed"]:
        """Return the features of a row."""
        live, places = row["frames"][-1], row["places"].astype(jnp.int32)
        x = self.stem_norm(self.stem(row["pixels"], row["scale"], row["shift"], live))
        table = self.positions[...]
        at = centres(places[:, :2], places[:, 2:], side := side_of(len(table)))
        x = x + stretched(table, cubic(at[:, 0], side), cubic(at[:, 1], side)).astype(x.dtype)
        shared = Shared({"frames": self.rotary.tables(places[:, :2])}, live)
        x, _ = self.layers(x, shared, None, within(attend))
        squares = live // self.layout.merge
        together = self.norm(x).reshape(len(x) // self.layout.merge, -1)
        return self.merger(self.down(together, squares), squares)

    def weights(self) -> Iterator[WeightSource]:
        """Yield the sources of all parameters."""

        def of_squares(kernel: Any) -> Any:  # [width, embed, rows, columns]
            return kernel.transpose(0, 2, 3, 1).reshape(len(kernel), -1).T

        yield from self.stem.weights(("stem",), "visual.patch_embed.proj")
        yield from self.stem_norm.weights(("stem_norm",), "visual.post_conv_layernorm")
        table = ("visual.embeddings.position_embedding.weight",)
        yield WeightSource(("positions",), table, convert.as_stored, P(None, None))
        yield from layer_weights(self.layers, (), NAMES.layers)
        yield from self.norm.weights(("norm",), "visual.post_layernorm")
        yield from self.down.weights(("down",), ("visual.downsample",), None, of_squares, may_quantise=False)
        yield from self.merger.weights(("merger",), "visual.merger")

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """Return a source's target, see `jpaged.model_api.CausalLM.locate`."""
        return self.layers.locate(source, "layers")


GLM4V = VisionFamily(Glm4vVision, PROCESSOR, PREFIXES, axes=3)
