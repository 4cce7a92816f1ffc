"""InternVL's tower (InternViT; Chen et al., 2024), whose tiles each have a class besides their patches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import AttendWithinSegments, BuildContext, SegmentKind, WeightSource

from ..attention import ProjectionNames
from ..dense import MLPSpec
from ..encoder import EncoderNames, EncoderSpec
from ..layers import LayerNorm, check_activation
from ..parameters import random_param
from ..stack import LayerKind, Shared
from .family import VisionFamily
from .pixtral import PREFIXES, layers_seen
from .stretched import centres, cubic, stretched
from .tower import PixelStem, SquareMerger, layer_weights, layers_of, row_of_patches, within

PROJECTOR_EPS = 1e-5
QK_EPS = 1e-6
NAMES = EncoderNames(
    layers="vision_tower.encoder.layer",
    attention="attention",
    projections=ProjectionNames(out="projection_layer"),
    attention_norm="layernorm_before",
    mlp_norm="layernorm_after",
    final_norm="vision_tower.layernorm",
)
PROCESSOR = "jpaged.images.internvl:InternVLImageProcessor"


class InternVLVision(nnx.Module):
    """InternVL's tower and what leads to the language model; `config` is the whole model's, with ``vision_config``.

    Parameters: stem; class_token [embed], which begins the class; positions [1 + side * side, embed], the class's and a
    table of a square grid, which is stretched to each tile's, if the config has some; layers; norm, if it has one;
    project.
    """

    levels = 1

    def __init__(self, config: Any, build: BuildContext):
        vision, text = config.vision_config, config.get_text_config()
        embed, channels, merge = vision.hidden_size, vision.num_channels, round(1 / config.downsample_ratio)
        (height, width), (patch, across) = vision.image_size, vision.patch_size
        if height != width or patch != across or height % patch:
            raise ValueError(
                f"image_size={vision.image_size} and patch_size={vision.patch_size} of the tower are no squares"
            )
        if merge * config.downsample_ratio != 1:
            raise ValueError(f"downsample_ratio={config.downsample_ratio} is not supported: it is 1 / a whole number")
        if config.vision_feature_select_strategy != "default":
            strategy = config.vision_feature_select_strategy
            raise ValueError(f"vision_feature_select_strategy={strategy!r} is not supported, only 'default'")
        self.side = height // patch
        usual = max(1, (self.side**2 + merge**2) // 8)  # tiles of a processor may be smaller than the config's
        self.layout = row_of_patches(channels, patch**2, merge**2, SegmentKind("tiles", usual=usual))
        self.stem = PixelStem(channels, patch**2, embed, build, bias=True)
        self.class_token = random_param(build, (embed,))
        has_places = vision.use_absolute_position_embeddings
        self.positions = random_param(build, (1 + self.side**2, embed)) if has_places else None
        (seen,) = layers_seen(config, vision.num_hidden_layers)
        spec = EncoderSpec(
            embed,
            vision.num_attention_heads,
            MLPSpec(vision.intermediate_size, vision.hidden_act, gated=False, names=("fc1", "fc2"), bias=True),
            vision.layer_norm_eps,
            (LayerKind("tiles"),) * seen,
            norm={"layer_norm": "layer", "rms_norm": "rms"}[vision.norm_type],
            norm_before=True,
            qkv_bias=vision.attention_bias,
            norm_of_heads=QK_EPS if vision.use_qk_norm else None,
            scaled_by=("lambda_1", "lambda_2"),
            names=NAMES,
        )
        self.layers = layers_of(spec, build)
        normed = config.vision_feature_layer == -1 and not vision.use_mean_pooling
        self.norm = LayerNorm(embed, vision.layer_norm_eps, build) if normed else None
        self.project = SquareMerger(
            LayerNorm(embed * merge**2, PROJECTOR_EPS, build),
            embed,
            merge**2,
            text.hidden_size,
            build,
            activation=check_activation(config.projector_hidden_act, "projector_hidden_act"),
            of_squares=True,
            columns=text.hidden_size,
        )

    def __call__(self, row: Mapping[str, Array], attend: AttendWithinSegments) -> Float[Array, "features embed"]:
        """Return the features of a row."""
        live = row["tiles"][-1]
        places = row["places"].astype(jnp.int32)
        x = self.stem(row["pixels"], row["scale"], row["shift"], live)
        is_class = (places[:, 0] < 0)[:, None]
        x = jnp.where(is_class, self.class_token[...].astype(x.dtype), x)
        if self.positions is not None:
            x = x + self._placed(self.positions[...], places, is_class).astype(x.dtype)
        x, _ = self.layers(x, Shared({"tiles": None}, live), None, within(attend))
        if self.norm is not None:
            x = self.norm(x)
        return self.project(x, live // self.layout.merge)

    def _placed(self, table: Array, places: Int[Array, "patches 4"], is_class: Array) -> Float[Array, "patches embed"]:
        at = centres(places[:, :2], places[:, 2:], self.side)
        own = stretched(table[1:], cubic(at[:, 0], self.side), cubic(at[:, 1], self.side))
        return jnp.where(is_class, table[0], own)

    def weights(self) -> Iterator[WeightSource]:
        """Yield the sources of all parameters."""
        embeddings = "vision_tower.embeddings"
        yield from self.stem.weights(("stem",), f"{embeddings}.patch_embeddings.projection")
        yield WeightSource(("class_token",), (f"{embeddings}.cls_token",), lambda token: token.reshape(-1), P(None))
        if self.positions is not None:
            yield WeightSource(
                ("positions",), (f"{embeddings}.position_embeddings",), lambda table: table[0], P(None, None)
            )
        yield from layer_weights(self.layers, (), NAMES.layers)
        if self.norm is not None:
            yield from self.norm.weights(("norm",), "vision_tower.layernorm")
        layers = [f"multi_modal_projector.linear_{number}" for number in (1, 2)]
        yield from self.project.weights(("project",), norm="multi_modal_projector.layer_norm", layers=layers)

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """Return a source's target, see `jpaged.model_api.CausalLM.locate`."""
        return self.layers.locate(source, "layers")


INTERNVL = VisionFamily(InternVLVision, PROCESSOR, PREFIXES)
