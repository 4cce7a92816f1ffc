"""Towers with learned positions: SigLIP (Zhai et al., 2023) and CLIP (Radford et al., 2021), of tiles of one size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import AttendWithinSegments, BuildContext, RowArray, RowLayout, SegmentKind, WeightSource

from .. import weights as convert
from ..attention import ProjectionNames
from ..dense import MLPSpec
from ..encoder import EncoderNames, EncoderSpec
from ..layers import LayerNorm
from ..parameters import random_param
from ..stack import LayerKind, Shared
from .tower import PixelStem, layer_weights, layers_of, within

TILES = "tiles"
"""The segments: patches see their whole tile."""
PREFIXES = tuple(
    (f"{model}{part}{inner}", part)
    for part, inners in (
        ("vision_tower.", ("vision_model.", "")),
        ("multi_modal_projector.", ("",)),
        ("image_newline", ("",)),
    )
    for model in ("model.", "")
    for inner in inners
)
"""The prefixes of families whose checkpoints have ``vision_tower`` and ``multi_modal_projector``."""
_NAMES = EncoderNames(
    layers="encoder.layers",
    attention="self_attn",
    projections=ProjectionNames(("q_proj", "k_proj", "v_proj"), "out_proj"),
    attention_norm="layer_norm1",
    mlp_norm="layer_norm2",
)
_CLIP = "clip_vision_model"


def has_class_token(vision: Any) -> bool:
    """Tell whether a tile has a token of the class in front of its patches."""
    return vision.model_type == _CLIP


def row_layout(
    vision: Any,
    *,
    merge: int = 1,
    tiles: int | None = None,
    features: tuple[RowArray, ...] = (),
    spare: int = 0,
) -> RowLayout:
    """Return how a row holds the arrays of `jpaged.images.tiles.TileProcessor`.

    Args:
        tiles: most tiles of an image; None = images are one tile each, and a row has room for four.
        merge, features, spare: see `RowLayout`.
    """
    channels, tile = vision.num_channels, (vision.image_size // vision.patch_size) ** 2 + has_class_token(vision)
    return RowLayout(
        (RowArray("pixels", (channels * vision.patch_size**2,), "uint8"), RowArray("places", (), "int32")),
        (RowArray("scale", (channels,), "float32"), RowArray("shift", (channels,), "float32")),
        (SegmentKind(TILES, tile, tile),),
        merge,
        features=features,
        spare=spare,
        unit=tile,
        largest=tile * (tiles or 1),
        together=4 if tiles is None else 1,
    )


class LearnedTower(nnx.Module):
    """A stem, a table of positions, and layers.

    Parameters: stem; class_token [embed] and norm_before (CLIP); positions [places, embed]; layers; norm.

    Args:
        vision: a Hugging Face ``SiglipVisionConfig``, ``CLIPVisionConfig`` or ``Idefics3VisionConfig``.
        reads: numbers of the states that are returned side by side: 0 is what enters the first layer, -1 what leaves
            the last. Layers after them are left out.
        normed: whether the final norm follows.
    """

    def __init__(self, vision: Any, build: BuildContext, *, reads: Sequence[int] = (-1,), normed: bool = False):
        embed, depth, eps = vision.hidden_size, vision.num_hidden_layers, vision.layer_norm_eps
        if not reads or not all(-depth - 1 <= number <= depth for number in reads):
            raise ValueError(f"vision_feature_layer={list(reads)} are not states of an encoder of {depth} layers")
        self.reads = tuple(number % (depth + 1) for number in reads)
        is_clip = has_class_token(vision)
        numbers = vision.patch_size**2
        self.stem = PixelStem(vision.num_channels, numbers, embed, build, bias=not is_clip)
        self.class_token = random_param(build, (embed,)) if is_clip else None
        self.positions = random_param(build, ((vision.image_size // vision.patch_size) ** 2 + is_clip, embed))
        self.norm_before = LayerNorm(embed, eps, build) if is_clip else None
        mlp = MLPSpec(vision.intermediate_size, vision.hidden_act, gated=False, names=("fc1", "fc2"), bias=True)
        kept = max(1, *self.reads)
        spec = EncoderSpec(
            embed,
            vision.num_attention_heads,
            mlp,
            eps,
            (LayerKind(TILES),) * kept,
            norm_before=True,
            names=_NAMES,
        )
        self.layers = layers_of(spec, build)
        self.taps = tuple(sorted(set(self.reads)))
        if self.taps != (kept,):
            self.layers.tap(self.taps)
        self.norm = LayerNorm(embed, eps, build) if normed else None

    def __call__(self, row: Mapping[str, Array], attend: AttendWithinSegments) -> Float[Array, "patches states"]:
        """Return a vector for each patch of a row."""
        live, places = row[TILES][-1], row["places"]
        x = self.stem(row["pixels"], row["scale"], row["shift"], live)
        if self.class_token is not None:
            x = jnp.where((places == 0)[:, None], self.class_token[...], x)
        x = x + jnp.take(self.positions[...], places, axis=0, mode="clip")
        if self.norm_before is not None:
            x = self.norm_before(x)
        x, _, *within_it = self.layers(x, Shared({TILES: None}, live), None, within(attend))
        if within_it:
            states = jnp.split(within_it[0], len(self.taps), axis=-1)
            x = jnp.concatenate([states[self.taps.index(number)] for number in self.reads], axis=-1)
        return x if self.norm is None else self.norm(x)

    def weights(self, name: str) -> Iterator[WeightSource]:
        """Yield the sources of all parameters, whose tensors begin with `name`."""
        yield from self.stem.weights(("stem",), f"{name}.embeddings.patch_embedding")
        if self.class_token is not None:
            stored = (f"{name}.embeddings.class_embedding",)
            yield WeightSource(("class_token",), stored, convert.as_stored, P(None))
        table = (f"{name}.embeddings.position_embedding.weight",)
        yield WeightSource(("positions",), table, convert.as_stored, P(None, None))
        if self.norm_before is not None:
            yield from self.norm_before.weights(("norm_before",), f"{name}.pre_layrnorm")
        yield from layer_weights(self.layers, (), f"{name}.{_NAMES.layers}")
        if self.norm is not None:
            yield from self.norm.weights(("norm",), f"{name}.post_layernorm")


class Projector(Protocol):
    """Makes features of what a `LearnedTower` returns."""

    def __call__(
        self, x: Float[Array, "patches states"], row: Mapping[str, Array]
    ) -> Float[Array, "features embed"]: ...

    def weights(self, path: tuple[str, ...]) -> Iterator[WeightSource]: ...


class ProjectedTower(nnx.Module):
    """A family's tower: a `LearnedTower` and a projector; a family says how both are built."""

    levels = 1

    def __init__(self, tower: LearnedTower, projector: Projector, layout: RowLayout, name: str = "vision_tower"):
        self.tower = tower
        self.projector = projector
        self.layout = layout
        self.name = name

    def __call__(self, row: Mapping[str, Array], attend: AttendWithinSegments) -> Float[Array, "features embed"]:
        """Return the features of a row."""
        return self.projector(self.tower(row, attend), row)

    def weights(self) -> Iterator[WeightSource]:
        """Yield the sources of all parameters."""
        for source in self.tower.weights(self.name):
            yield source if source.layer is not None else replace(source, path=("tower", *source.path))
        yield from self.projector.weights(("projector",))

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """Return a source's target, see `jpaged.model_api.CausalLM.locate`."""
        path, index = self.tower.layers.locate(source, "layers")
        return (path if source.layer is None else ("tower", *path)), index
