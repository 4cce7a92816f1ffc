"""The tower of Qwen3-VL and Qwen3.5 (Qwen Team, 2025)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import AttendWithinSegments, BuildContext, RowLayout, SegmentKind, WeightSource

from .. import weights as convert
from ..attention import ProjectionNames
from ..dense import MLPSpec
from ..encoder import EncoderNames, EncoderSpec
from ..layers import LayerNorm
from ..parameters import random_param
from ..stack import LayerKind, Shared
from .family import VisionFamily
from .stretched import linear, side_of, stretched
from .tower import PixelStem, SquareMerger, axial, layer_weights, layers_of, row_of_patches, within

EPS = 1e-6
NAMES = EncoderNames(
    layers="visual.blocks",
    attention="attn",
    projections=ProjectionNames(("qkv",), "proj"),
    attention_norm="norm1",
    mlp_norm="norm2",
)
PROCESSOR = "jpaged.images.qwen:QwenImageProcessor"
PREFIXES = (("model.visual.", "visual."), ("visual.", "visual."))


def row_layout(vision: Any, *segments: SegmentKind) -> RowLayout:
    """Return how a row holds the arrays of `jpaged.images.qwen.QwenImageProcessor`."""
    numbers = vision.temporal_patch_size * vision.patch_size**2
    merge = vision.spatial_merge_size**2
    return row_of_patches(vision.in_channels, numbers, merge, SegmentKind("frames"), *segments)


class Qwen3Vision(nnx.Module):
    """The tower of Qwen3-VL and Qwen3.5; `config` is the whole model's, with ``vision_config``.

    Parameters: stem; positions [side * side, embed], a table of a square grid, which is stretched to each image's;
    layers; merger, and deep, a merger of what leaves each of the config's ``deepstack_visual_indexes``.
    """

    def __init__(self, config: Any, build: BuildContext):
        vision = config.vision_config
        embed, width = vision.hidden_size, vision.out_hidden_size
        self.layout = row_layout(vision)
        self.side = side_of(vision.num_position_embeddings)
        numbers = vision.temporal_patch_size * vision.patch_size**2
        self.stem = PixelStem(vision.in_channels, numbers, embed, build, bias=True)
        self.positions = random_param(build, (self.side**2, embed))
        rope = getattr(vision, "rope_parameters", None) or {}
        self.rotary = axial(embed // vision.num_heads, rope.get("rope_theta", 10000.0))
        mlp = MLPSpec(
            vision.intermediate_size, vision.hidden_act, gated=False, names=("linear_fc1", "linear_fc2"), bias=True
        )
        spec = EncoderSpec(
            embed,
            vision.num_heads,
            mlp,
            EPS,
            (LayerKind("frames"),) * vision.depth,
            norm_before=True,
            rotary=(("frames", self.rotary),),
            names=NAMES,
        )
        self.layers = layers_of(spec, build)
        merge = self.layout.merge
        self.merger = SquareMerger(LayerNorm(embed, EPS, build), embed, merge, width, build)
        deep = tuple(getattr(vision, "deepstack_visual_indexes", ()))
        self.deep = nnx.List(
            SquareMerger(LayerNorm(embed * merge, EPS, build), embed, merge, width, build, of_squares=True)
            for _ in deep
        )
        self.levels = 1 + len(deep)
        if deep:
            self.layers.tap(tuple(number + 1 for number in deep))

    def __call__(self, row: Mapping[str, Array], attend: AttendWithinSegments) -> Float[Array, "features embeds"]:
        """Return the features of a row, each with its levels side by side."""
        live = row["frames"][-1]
        places = row["places"].astype(jnp.int32)
        x = self.stem(row["pixels"], row["scale"], row["shift"], live)
        x = x + self._stretched(places).astype(x.dtype)
        shared = Shared({"frames": self.rotary.tables(places[:, :2])}, live)
        x, _, *deep = self.layers(x, shared, None, within(attend))
        squares = live // self.layout.merge
        found = [self.merger(x, squares)]
        for merger, entered in zip(self.deep, jnp.split(deep[0], len(self.deep), axis=-1) if deep else (), strict=True):
            found.append(merger(entered, squares))
        return jnp.concatenate(found, axis=-1)

    def _stretched(self, places: Int[Array, "patches 4"]) -> Float[Array, "patches embed"]:
        """Return each patch's entry of the table, whose corners are the image's, between its four neighbours."""
        at = places[:, :2] * (self.side - 1) / jnp.maximum(places[:, 2:] - 1, 1)
        return stretched(self.positions[...], linear(at[:, 0], self.side), linear(at[:, 1], self.side))

    def weights(self) -> Iterator[WeightSource]:
        """Yield the sources of all parameters."""
        yield from self.stem.weights(("stem",), "visual.patch_embed.proj")
        table = ("visual.pos_embed.weight",)
        yield WeightSource(("positions",), table, convert.as_stored, P(None, None))
        yield from layer_weights(self.layers, (), NAMES.layers)
        both = ("linear_fc1", "linear_fc2")
        mergers: list[tuple[Any, str, SquareMerger]] = [(("merger",), "visual.merger", self.merger)]
        mergers += [(("deep", n), f"visual.deepstack_merger_list.{n}", each) for n, each in enumerate(self.deep)]
        for path, name, merger in mergers:
            yield from merger.weights(path, norm=f"{name}.norm", layers=[f"{name}.{each}" for each in both])

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """Return a source's target, see `jpaged.model_api.CausalLM.locate`."""
        return self.layers.locate(source, "layers")


QWEN3_VL = VisionFamily(Qwen3Vision, PROCESSOR, PREFIXES, axes=3)
