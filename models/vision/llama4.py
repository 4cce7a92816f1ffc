"""Llama 4's tower (Meta, 2025), whose tiles each have a class besides their patches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import AttendWithinSegments, BuildContext, RowArray, RowLayout, SegmentKind, WeightSource

from .. import weights as convert
from ..attention import ProjectionNames
from ..dense import MLPSpec
from ..encoder import EncoderNames, EncoderSpec
from ..layers import ACTIVATIONS, LayerNorm
from ..linear import Linear
from ..parameters import random_param
from ..rope import Rotary
from ..stack import LayerKind, Shared
from .family import VisionFamily
from .tower import PixelStem, SquareMerger, axial, layer_weights, layers_of, within

EPS = 1e-5
NAMES = EncoderNames(
    layers="vision_model.model.layers",
    attention="self_attn",
    projections=ProjectionNames(),
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
)
PROCESSOR = "jpaged.images.llama4:Llama4ImageProcessor"
PREFIXES = tuple(
    (before + part, part) for part in ("vision_model.", "multi_modal_projector.") for before in ("model.", "")
)


class Llama4Vision(nnx.Module):
    """Llama 4's tower and what leads to the language model; `config` is the whole model's, with ``vision_config``.

    Parameters: stem; class_token [embed]; positions [side * side + 1, embed], the class's last; norm_before; layers;
    norm_after; merger; project.
    """

    levels = 1

    def __init__(self, config: Any, build: BuildContext):
        vision, merge = config.vision_config, round(1 / config.vision_config.pixel_shuffle_ratio)
        embed, channels, patch = vision.hidden_size, vision.num_channels, vision.patch_size
        self.side = vision.image_size // patch
        self.layout = RowLayout(
            (RowArray("pixels", (channels * patch**2,), "uint8"), RowArray("places", (4,), "int16")),
            tuple(
                RowArray(name, (count,), "float32")
                for name, count in (("factor", 1), ("mean", channels), ("std", channels))
            ),
            (SegmentKind("tiles", usual=max(1, (self.side**2 + merge**2) // 2)),),
            merge**2,
        )
        self.stem = PixelStem(channels, patch**2, embed, build, bias=False)
        self.class_token = random_param(build, (embed,))
        self.positions = random_param(build, (self.side**2 + 1, embed))
        pairs = axial(embed // vision.num_attention_heads, vision.rope_parameters["rope_theta"])
        self.rotary = Rotary(pairs.frequencies, axes=tuple(1 - axis for axis in pairs.axes))  # columns first
        spec = EncoderSpec(
            embed,
            vision.num_attention_heads,
            MLPSpec(vision.intermediate_size, "gelu", gated=False, names=("fc1", "fc2"), bias=True),
            EPS,
            (LayerKind("tiles"),) * vision.num_hidden_layers,
            norm_before=True,
            rotary=(("tiles", self.rotary),),
            names=NAMES,
        )
        self.norm_before = LayerNorm(embed, EPS, build)
        self.layers = layers_of(spec, build, rotates_neighbours=True)
        self.norm_after = LayerNorm(embed, EPS, build)
        width = vision.projector_output_dim
        self.merger = SquareMerger(None, embed, merge**2, width, build, columns=vision.projector_input_dim, bias=False)
        self.project = Linear(width, config.get_text_config().hidden_size, build, partition=P(None, None))

    def __call__(self, row: Mapping[str, Array], attend: AttendWithinSegments) -> Float[Array, "features embed"]:
        """Return the features of a row."""
        live = row["tiles"][-1]
        places = row["places"].astype(jnp.int32)
        numbers = scaled_as_bfloat16(row["pixels"], row["factor"], row["mean"], row["std"])
        x = self.stem.project(numbers.astype(self.class_token.dtype), live)
        is_class = places[:, 0] < 0
        x = jnp.where(is_class[:, None], self.class_token[...], x)
        number = jnp.where(is_class, self.side**2, places[:, 0] * self.side + places[:, 1])
        x = self.norm_before(x + jnp.take(self.positions[...], number, axis=0, mode="clip"))
        tables = self.rotary.tables(places[:, :2] + 1)  # the class stands still
        x, _ = self.layers(x, Shared({"tiles": tables}, live), None, within(attend))
        squares = live // self.layout.merge
        return self.project(ACTIVATIONS["gelu"](self.merger(self.norm_after(x), squares)), squares)

    def weights(self) -> Iterator[WeightSource]:
        """Yield the sources of all parameters."""
        yield from self.stem.weights(("stem",), "vision_model.patch_embedding.linear")
        yield WeightSource(("class_token",), ("vision_model.class_embedding",), convert.as_stored, P(None))
        table = ("vision_model.positional_embedding_vlm",)
        yield WeightSource(("positions",), table, convert.as_stored, P(None, None))
        yield from self.norm_before.weights(("norm_before",), "vision_model.layernorm_pre")
        yield from layer_weights(self.layers, (), NAMES.layers)
        yield from self.norm_after.weights(("norm_after",), "vision_model.layernorm_post")
        layers = [f"vision_model.vision_adapter.mlp.fc{number}" for number in (1, 2)]
        yield from self.merger.weights(("merger",), layers=layers)
        name, plain = "multi_modal_projector.linear_1", convert.linear(*self.project.weight.shape)
        yield from self.project.weights(("project",), (name,), None, plain, may_quantise=False)

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """Return a source's target, see `jpaged.model_api.CausalLM.locate`."""
        return self.layers.locate(source, "layers")


def scaled_as_bfloat16(
    pixels: Int[Array, "patches numbers"],
    factor: Float[Array, " 1"],
    mean: Float[Array, " channels"],
    std: Float[Array, " channels"],
) -> Float[Array, "patches numbers"]:
    """Return scaled bytes, each result rounded to bfloat16, which is how the model was trained."""

    def rounded(x: Array) -> Array:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)

    each = pixels.reshape(len(pixels), len(mean), -1).astype(jnp.float32)
    each = rounded(each * factor)
    each = rounded(each - rounded(mean)[:, None])
    return rounded(each / rounded(std)[:, None]).reshape(pixels.shape)


LLAMA4 = VisionFamily(Llama4Vision, PROCESSOR, PREFIXES)
