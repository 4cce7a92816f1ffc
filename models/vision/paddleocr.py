"""The tower of PaddleOCR-VL (Baidu, 2025): SigLIP for pictures of any shape, rotated and with stretched positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import AttendWithinSegments, BuildContext, SegmentKind, WeightSource

from .. import weights as convert
from ..attention import ProjectionNames
from ..dense import MLPSpec
from ..encoder import EncoderNames, EncoderSpec
from ..layers import LayerNorm
from ..parameters import random_param
from ..stack import LayerKind, Shared
from .family import VisionFamily
from .stretched import centres, linear, side_of, stretched
from .tower import PixelStem, SquareMerger, axial, layer_weights, layers_of, row_of_patches, within

PROCESSOR = "jpaged.images.paddleocr:PaddleOCRImageProcessor"
PREFIXES = (
    ("model.visual.vision_model.", "visual."),
    ("visual.vision_model.", "visual."),
    ("model.projector.", "projector."),
    ("mlp_AR.", "projector."),
)
_NAMES = EncoderNames(
    layers="visual.encoder.layers",
    attention="self_attn",
    projections=ProjectionNames(out="out_proj"),
    attention_norm="layer_norm1",
    mlp_norm="layer_norm2",
)
_MERGER_EPS = 1e-5


class PaddleOCRVision(nnx.Module):
    """The tower of PaddleOCR-VL; `config` is the whole model's, with ``vision_config`` and ``text_config``.

    Parameters: stem; positions [side * side, embed]; layers, norm; merger.
    """

    levels = 1

    def __init__(self, config: Any, build: BuildContext):
        vision, width = config.vision_config, config.text_config.hidden_size
        embed, channels, eps = vision.hidden_size, vision.num_channels, vision.layer_norm_eps
        self.layout = row_of_patches(
            channels, vision.patch_size**2, vision.spatial_merge_size**2, SegmentKind("frames")
        )
        self.stem = PixelStem(channels, vision.patch_size**2, embed, build, bias=True)
        self.positions = random_param(build, ((vision.image_size // vision.patch_size) ** 2, embed))
        rope = getattr(vision, "rope_parameters", None) or {}
        self.rotary = axial(embed // vision.num_attention_heads, rope.get("rope_theta", 10000.0))
        spec = EncoderSpec(
            embed,
            vision.num_attention_heads,
            MLPSpec(vision.intermediate_size, vision.hidden_act, gated=False, names=("fc1", "fc2"), bias=True),
            eps,
            (LayerKind("frames"),) * vision.num_hidden_layers,
            norm_before=True,
            rotary=(("frames", self.rotary),),
            names=_NAMES,
        )
        self.layers = layers_of(spec, build)
        self.norm = LayerNorm(embed, eps, build)
        self.merger = SquareMerger(LayerNorm(embed, _MERGER_EPS, build), embed, self.layout.merge, width, build)

    def __call__(self, row: Mapping[str, Array], attend: AttendWithinSegments) -> Float[Array, "features embed"]:
        """Return the features of a row."""
        live, places = row["frames"][-1], row["places"].astype(jnp.int32)
        x = self.stem(row["pixels"], row["scale"], row["shift"], live)
        table = self.positions[...]
        at = centres(places[:, :2], places[:, 2:], side := side_of(len(table)))
        x = x + stretched(table, linear(at[:, 0], side), linear(at[:, 1], side)).astype(x.dtype)
        shared = Shared({"frames": self.rotary.tables(places[:, :2])}, live)
        x, _ = self.layers(x, shared, None, within(attend))
        return self.merger(self.norm(x), live // self.layout.merge)

    def weights(self) -> Iterator[WeightSource]:
        """Yield the sources of all parameters."""
        yield from self.stem.weights(("stem",), "visual.embeddings.patch_embedding")
        table = ("visual.embeddings.position_embedding.weight",)
        yield WeightSource(("positions",), table, convert.as_stored, P(None, None))
        yield from layer_weights(self.layers, (), _NAMES.layers)
        yield from self.norm.weights(("norm",), "visual.post_layernorm")
        layers = [f"projector.linear_{number}" for number in (1, 2)]
        yield from self.merger.weights(("merger",), norm="projector.pre_norm", layers=layers)

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """Return a source's target, see `jpaged.model_api.CausalLM.locate`."""
        return self.layers.locate(source, "layers")


PADDLEOCR_VL = VisionFamily(PaddleOCRVision, PROCESSOR, PREFIXES, axes=3)
