"""The towers of Gemma 4 (Gemma Team, 2026): patches of a picture's own shape, rotated by their column and row.

Squares of patches are averaged into features. Some checkpoints keep the inputs and results of products within bounds.
Gemma 4 Unified has no layers for pictures: each square is projected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import (
    TENSOR_AXIS,
    Attend,
    AttendWithinSegments,
    AttentionGroup,
    BuildContext,
    LayerRef,
    SegmentKind,
    WeightSource,
)

from .. import weights as convert
from ..attention import Heads
from ..layers import ACTIVATIONS, LayerNorm, RMSNorm, check_activation
from ..linear import Linear, LiveRows
from ..parameters import constant_param, random_param
from ..rope import rotate
from ..stack import LayerKind, LayerStack, Shared
from .family import VisionFamily
from .tower import PixelStem, axial, channels_first, layer_weights, row_of_patches, scaled_pixels, within

PROCESSOR = "jpaged.images.gemma4:Gemma4ImageProcessor"
PREFIXES = (
    ("model.vision_tower.", "vision_tower."),
    ("vision_tower.", "vision_tower."),
    ("model.embed_vision.", "embed_vision."),
    ("embed_vision.", "embed_vision."),
    ("model.vision_embedder.", "vision_embedder."),
    ("vision_embedder.", "vision_embedder."),
)
CHANNELS = 3
LAYER_NORM_EPS = 1e-5
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
_NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


class ClippedLinear(nnx.Module):
    """A `Linear` whose inputs and results are kept within `bounds` [4], where the checkpoint has them."""

    def __init__(self, inputs: int, outputs: int, build: BuildContext, *, partition: P, clips: bool):
        self.linear = Linear(inputs, outputs, build, partition=partition)
        self.bounds = constant_param(build, (len(_BOUNDS),)) if clips else None

    def __call__(self, x: Float[Array, "tokens inputs"], live_rows: LiveRows) -> Float[Array, "tokens outputs"]:
        """Return the product; its rows from `live_rows` on mean nothing."""
        if self.bounds is None:
            return self.linear(x, live_rows)
        low, high, least, most = self.bounds[...].astype(x.dtype)
        return jnp.clip(self.linear(jnp.clip(x, low, high), live_rows), least, most)

    def weights(
        self, path: tuple[str, ...], name: str, layer: int, converter: convert.Converter
    ) -> Iterator[WeightSource]:
        """Yield the sources of ``{name}.linear.weight`` and of the bounds, each one number."""
        yield from self.linear.weights((*path, "linear"), (f"{name}.linear",), layer, converter)
        if self.bounds is not None:
            tensors = tuple(f"{name}.{bound}" for bound in _BOUNDS)
            yield WeightSource((*path, "bounds"), tensors, _numbers, P(None), layer)


def _numbers(*stored: np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray(number).reshape(1) for number in stored])


class TowerAttention(nnx.Module):
    """Attention whose queries, keys and values are normed; projections are apart, as their bounds are.

    Parameters: q, k, v and out, of heads by their slots; q_norm and k_norm over head_dim.
    """

    def __init__(self, vision: Any, heads: Heads, build: BuildContext):
        size, width, layout = vision.hidden_size, heads.head_dim, heads.layout
        make = partial(ClippedLinear, build=build, clips=vision.use_clipped_linears)
        columns, slots = P(None, TENSOR_AXIS), layout.kv_heads
        self.q = make(size, slots * layout.q_per_kv * width, partition=columns)
        self.k = make(size, slots * width, partition=columns)
        self.v = make(size, slots * width, partition=columns)
        self.out = make(slots * layout.q_per_kv * width, size, partition=P(TENSOR_AXIS, None))
        self.q_norm, self.k_norm = (RMSNorm(width, vision.rms_norm_eps, build) for _ in range(2))
        self.v_norm = RMSNorm(width, vision.rms_norm_eps, build, affine=False)
        self.heads = heads

    def __call__(
        self, x: Float[Array, "patches embed"], shared: Shared, ref: LayerRef, attend: Attend
    ) -> Float[Array, "patches embed"]:
        live, tables, width = shared.live_rows, shared.tables[ref.group], self.heads.head_dim
        assert tables is not None
        slots, share = self.heads.layout.kv_heads, self.heads.layout.q_per_kv
        q = rotate(self.q_norm(self.q(x, live).reshape(len(x), slots, share, width)), tables)
        k = rotate(self.k_norm(self.k(x, live).reshape(len(x), slots, width)), tables)
        v = self.v_norm(self.v(x, live).reshape(len(x), slots, width))
        _, mixed = attend(None, ref, q, k, v, scale=1.0, soft_cap=None, sinks=None)
        return self.out(mixed.astype(x.dtype).reshape(len(x), -1), live)

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.q_proj.linear.weight`` and so on."""
        heads, width = self.heads, self.heads.head_dim
        layout, queries, pairs = heads.layout, heads.num_heads, heads.num_kv_heads
        q = _after(_halves_first(queries, width), convert.fuse_qkv(layout, queries, pairs, width))
        k, v = (convert.place_kv(layout, pairs, width) for _ in range(2))
        yield from self.q.weights((*path, "q"), f"{name}.q_proj", layer, q)
        yield from self.k.weights((*path, "k"), f"{name}.k_proj", layer, _after(_halves_first(pairs, width), k))
        yield from self.v.weights((*path, "v"), f"{name}.v_proj", layer, v)
        out = convert.split_out(layout, queries, width)
        yield from self.out.weights((*path, "out"), f"{name}.o_proj", layer, out)
        for attribute in ("q_norm", "k_norm"):
            scale, tensor = (*path, attribute, "scale"), (f"{name}.{attribute}.weight",)
            yield WeightSource(scale, tensor, _halves_first(1, width), P(None), layer)


def _halves_first(heads: int, width: int) -> Callable[[Any], Any]:
    """Return a converter [heads * width, ...] of heads whose halves are rotated apart, each as a head of its own, into
    heads whose pairs lie half a head apart, as `rotate` has them. Products of queries and keys stay the same."""

    def placed(stored: Any) -> Any:
        by_axis = np.asarray(stored).reshape(heads, 2, 2, width // 4, *stored.shape[1:])
        return by_axis.swapaxes(1, 2).reshape(stored.shape)

    return placed


def _after(first: Callable[[Any], Any], then: convert.Converter) -> convert.Converter:
    return lambda stored: then(first(stored))


class TowerMLP(nnx.Module):
    """``down(act(gate(x)) * up(x))`` of clipped products."""

    def __init__(self, vision: Any, build: BuildContext):
        size = vision.hidden_size
        self.columns = convert.Padded(vision.intermediate_size, build.tensor_parallel)
        width, clips = self.columns.size, vision.use_clipped_linears
        make = partial(ClippedLinear, build=build, clips=clips)
        self.gate, self.up = (make(size, width, partition=P(None, TENSOR_AXIS)) for _ in range(2))
        self.down = make(width, size, partition=P(TENSOR_AXIS, None))
        self.activation = check_activation(vision.hidden_activation, "hidden_activation")
        self.size = size

    def __call__(self, x: Float[Array, "patches embed"], live: LiveRows) -> Float[Array, "patches embed"]:
        return self.down(ACTIVATIONS[self.activation](self.gate(x, live)) * self.up(x, live), live)

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.gate_proj.linear.weight`` and so on."""
        up, down = convert.linear(self.size, self.columns), convert.linear(self.columns, self.size)
        yield from self.gate.weights((*path, "gate"), f"{name}.gate_proj", layer, up)
        yield from self.up.weights((*path, "up"), f"{name}.up_proj", layer, up)
        yield from self.down.weights((*path, "down"), f"{name}.down_proj", layer, down)


class TowerLayer(nnx.Module):
    """``x += norm(attention(norm(x))); x += norm(mlp(norm(x)))``."""

    def __init__(self, vision: Any, heads: Heads, build: BuildContext):
        size, eps = vision.hidden_size, vision.rms_norm_eps
        self.input_norm, self.post_attention_norm = RMSNorm(size, eps, build), RMSNorm(size, eps, build)
        self.pre_mlp_norm, self.post_mlp_norm = RMSNorm(size, eps, build), RMSNorm(size, eps, build)
        self.attention = TowerAttention(vision, heads, build)
        self.mlp = TowerMLP(vision, build)

    def __call__(
        self, x: Float[Array, "patches embed"], shared: Shared, cache: Any, ref: LayerRef, attend: Attend
    ) -> tuple[Float[Array, "patches embed"], Any]:
        x = x + self.post_attention_norm(self.attention(self.input_norm(x), shared, ref, attend))
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x), shared.live_rows)), cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of layer number `layer`, whose tensors begin with `name`."""
        for attribute, tensor in _NORMS.items():
            yield from getattr(self, attribute).weights((attribute,), f"{name}.{tensor}", layer)
        yield from self.attention.weights(("attention",), f"{name}.self_attn", layer)
        yield from self.mlp.weights(("mlp",), f"{name}.mlp", layer)


class Gemma4Vision(nnx.Module):
    """The tower of Gemma 4; `config` is the whole model's, with ``vision_config``.

    Parameters: stem; positions [2, places, embed], of columns and of rows; layers; std_bias and std_scale [embed],
    where features are standardised; project [embed, width].
    """

    levels = 1

    def __init__(self, config: Any, build: BuildContext):
        vision = config.vision_config
        embed, numbers = vision.hidden_size, vision.patch_size**2
        self.layout = row_of_patches(CHANNELS, numbers, vision.pooling_kernel_size**2, SegmentKind("frames"), places=2)
        self.stem = PixelStem(CHANNELS, numbers, embed, build, bias=False)
        self.positions = random_param(build, (2, vision.position_embedding_size, embed))
        rope = vision.rope_parameters
        if rope.get("rope_type", "axial") != "axial":
            raise ValueError(f"rope_type={rope['rope_type']!r} of the tower is not supported; only 'axial'")
        self.rotary = axial(vision.head_dim, rope["rope_theta"])
        heads = Heads.of(vision.num_attention_heads, vision.num_key_value_heads, vision.head_dim, build)
        kinds = (LayerKind("frames"),) * vision.num_hidden_layers
        self.layers = LayerStack(kinds, lambda kind, build: TowerLayer(vision, heads, build), build)
        self.std_bias = constant_param(build, (embed,)) if vision.standardize else None
        self.std_scale = constant_param(build, (embed,), 1.0) if vision.standardize else None
        self.norm = RMSNorm(embed, vision.rms_norm_eps, build, affine=False)
        width = config.get_text_config().hidden_size
        self.project = Linear(embed, width, build, partition=P(None, None))

    def __call__(self, row: Mapping[str, Array], attend: AttendWithinSegments) -> Float[Array, "features width"]:
        """Return the features of a row."""
        live = row["frames"][-1]
        places = row["places"].astype(jnp.int32)
        # Pixels from 0 to 1 become -1 to 1, whatever the checkpoint's processor does to them before.
        x = self.stem(row["pixels"], 2 * row["scale"], 2 * row["shift"] - 1, live)
        for axis, table in enumerate(self.positions[...]):
            x = x + jnp.take(table, places[:, axis], axis=0, mode="clip")
        x, _ = self.layers(x, Shared({"frames": self.rotary.tables(places)}, live), None, within(attend))
        squares = x.reshape(-1, self.layout.merge, x.shape[-1])
        pooled = squares.astype(jnp.float32).mean(axis=1).astype(x.dtype).astype(jnp.float32) * x.shape[-1] ** 0.5
        if self.std_bias is not None and self.std_scale is not None:
            pooled = (pooled - self.std_bias[...].astype(jnp.float32)) * self.std_scale[...].astype(jnp.float32)
        return self.project(self.norm(pooled.astype(x.dtype)), live // self.layout.merge)

    def weights(self) -> Iterator[WeightSource]:
        """Yield the sources of all parameters."""
        patches = "vision_tower.patch_embedder"
        yield from self.stem.weights(("stem",), f"{patches}.input_proj", channels_last=True)
        tables = (f"{patches}.position_embedding_table",)
        yield WeightSource(("positions",), tables, convert.as_stored, P(None, None, None))
        yield from layer_weights(self.layers, (), "vision_tower.encoder.layers")
        for name in ("std_bias", "std_scale"):
            if getattr(self, name) is not None:
                yield WeightSource((name,), (f"vision_tower.{name}",), convert.as_stored, P(None))
        yield from _projection(self.project)

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """Return a source's target, see `jpaged.model_api.CausalLM.locate`."""
        return self.layers.locate(source, "layers")


class Gemma4UnifiedVision(nnx.Module):
    """The projection of Gemma 4 Unified; `config` is the whole model's, with ``vision_config``.

    Parameters: pixel_norm over a square's numbers; square; square_norm, place_norm over embed; positions [places, 2,
    embed], of columns and of rows; project [embed, width].
    """

    levels = 1

    def __init__(self, config: Any, build: BuildContext):
        vision = config.vision_config
        side, embed = vision.patch_size * vision.pooling_kernel_size, vision.mm_embed_dim
        numbers, width = CHANNELS * side**2, config.get_text_config().hidden_size
        if vision.output_proj_dims != embed:
            raise ValueError(f"output_proj_dims={vision.output_proj_dims} of vision_config is not mm_embed_dim={embed}")
        self.layout = row_of_patches(CHANNELS, side**2, 1, SegmentKind("frames"), places=2)
        self.pixel_norm = LayerNorm(numbers, LAYER_NORM_EPS, build)
        self.square = Linear(numbers, embed, build, partition=P(None, None), bias=True)
        self.square_norm, self.place_norm = (LayerNorm(embed, LAYER_NORM_EPS, build) for _ in range(2))
        self.positions = random_param(build, (vision.mm_posemb_size, 2, embed))
        self.norm = RMSNorm(embed, vision.rms_norm_eps, build, affine=False)
        self.project = Linear(embed, width, build, partition=P(None, None))

    def __call__(self, row: Mapping[str, Array], attend: AttendWithinSegments) -> Float[Array, "features width"]:
        """Return the features of a row."""
        live, places, table = row["frames"][-1], row["places"].astype(jnp.int32), self.positions[...]
        x = scaled_pixels(row["pixels"], row["scale"], row["shift"]).astype(table.dtype)
        x = self.square_norm(self.square(self.pixel_norm(x), live))
        x = x + sum(jnp.take(table[:, axis], places[:, axis], axis=0, mode="clip") for axis in range(2))
        return self.project(self.norm(self.place_norm(x)), live)

    def weights(self) -> Iterator[WeightSource]:
        """Yield the sources of all parameters."""
        name, in_turn = "vision_embedder", channels_first(CHANNELS)
        for source in self.pixel_norm.weights(("pixel_norm",), f"{name}.patch_ln1"):
            yield replace(source, convert=in_turn)
        square = _after(in_turn, convert.linear(*self.square.weight.shape))
        yield from self.square.weights(("square",), (f"{name}.patch_dense",), None, square, may_quantise=False)
        yield from self.square_norm.weights(("square_norm",), f"{name}.patch_ln2")
        yield from self.place_norm.weights(("place_norm",), f"{name}.pos_norm")
        table = (f"{name}.pos_embedding",)
        yield WeightSource(("positions",), table, convert.as_stored, P(None, None, None))
        yield from _projection(self.project)

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """Return a source's target, see `jpaged.model_api.CausalLM.locate`."""
        return source.path, None


def _projection(project: Linear) -> Iterator[WeightSource]:
    """Yield the source of the matrix that makes features of a width that the text model reads."""
    matrix, names = convert.linear(*project.weight.shape), ("embed_vision.embedding_projection",)
    yield from project.weights(("project",), names, None, matrix, may_quantise=False)


def _looks_ahead(config: Any, group: AttentionGroup) -> bool:
    return config.get_text_config().use_bidirectional_attention == "vision"


def _is_local_and_looks_ahead(config: Any, group: AttentionGroup) -> bool:
    return _looks_ahead(config, group) and group.sliding_window is not None


def _window_of_local_layers(config: Any) -> int | None:
    """Return the most tokens of an image: in local layers too they see all of it, which is so within the window."""
    text = config.get_text_config()
    return text.sliding_window if text.use_bidirectional_attention == "vision" else None


PADDING = ("image_token_id", "video_token_id", "audio_token_id")
GEMMA4 = VisionFamily(Gemma4Vision, PROCESSOR, PREFIXES, whole=_is_local_and_looks_ahead, padding=PADDING, given=True)
GEMMA4_UNIFIED = VisionFamily(
    Gemma4UnifiedVision,
    PROCESSOR,
    PREFIXES,
    whole=_looks_ahead,
    padding=PADDING,
    longest=_window_of_local_layers,
    given=True,
)
