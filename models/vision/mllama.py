"""Llama 3.2 Vision's encoder (Llama Team, 2024): the tiles of an image see each other, then gated layers follow.

Every tile has a class token and its patches. Where a tile lies among the others, and in which arrangement, is given by
learned tables, one entry an arrangement (`aspect_ratio_id`; 0 is padding).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import BuildContext, WeightSource

from .. import weights as convert
from ..layers import LayerNorm
from ..linear import Linear
from ..parameters import constant_param, random_param
from .encoder import Patches, VisionLayer, apply, layer_names, through, whole

_ALIGNMENT = 8
"""A tile's tokens are padded to a multiple of this: the model was trained so, and its tokens see the padding."""

_NORM_EPS = 1e-5
"""The epsilon of the norms before and after the first layers, which the config does not have."""


class MllamaVision(nnx.Module):
    """The encoder of Llama 3.2 Vision; `config` is a Hugging Face ``MllamaVisionConfig``.

    Parameters: class_token [embed]; positions [patches, embed], tile_positions [arrangements, tiles * patches * embed];
    before_tiles and after_tiles [arrangements, tiles * embed]; gates of one number each. Here ``patches`` counts the
    class token too.
    """

    def __init__(self, config: Any, build: BuildContext):
        embed, tiles, arrangements = config.hidden_size, config.max_num_tiles, config.max_aspect_ratio_id + 1
        self.image_shape = (tiles, config.num_channels, config.image_size, config.image_size)
        self.count = (config.image_size // config.patch_size) ** 2 + 1
        self.kept = tuple(config.intermediate_layers_indices)
        self.patches = Patches(config.num_channels, config.patch_size, embed, build)
        self.class_token = random_param(build, (embed,))
        self.positions = random_param(build, (self.count, embed))
        self.tile_positions = random_param(build, (arrangements, tiles * self.count * embed))
        self.position_gate = constant_param(build, (1,))
        self.before_tiles = random_param(build, (arrangements, tiles * embed))
        self.before_gate = constant_param(build, (1,))
        self.after_tiles = random_param(build, (arrangements, tiles * embed))
        self.after_gate = constant_param(build, (1,))
        self.norm_before = LayerNorm(embed, _NORM_EPS, build)
        self.norm_after = LayerNorm(embed, _NORM_EPS, build)

        def made(count: int, gated: bool) -> nnx.Dict:
            return nnx.Dict({name: VisionLayer(config, build, gated=gated) for name in layer_names(count)})

        self.local_layers = made(config.num_hidden_layers, False)
        self.global_layers = made(config.num_global_layers, True)
        self.local_names = layer_names(config.num_hidden_layers)
        self.global_names = layer_names(config.num_global_layers)

    def __call__(
        self,
        pixels: Float[Array, "images tiles channels height width"],
        aspect_ratio_id: Int[Array, " images"],
        aspect_ratio_mask: Int[Array, "images tiles"],
    ) -> Float[Array, "images tiles patches features"]:
        """Return for each token the last layer's vector and those that enter the config's intermediate layers, joined.

        Args:
            aspect_ratio_id: the arrangement of each image's tiles.
            aspect_ratio_mask: 1 for a tile, 0 for padding; what is returned of padding means nothing.

        Raises:
            ValueError: the pixels are not of the config's tiles, channels and image size.
        """
        if pixels.shape[1:] != self.image_shape:
            raise ValueError(f"pixels.shape={pixels.shape}, the encoder takes [images, {self.image_shape}]")
        images, tiles = pixels.shape[:2]
        x = self.patches(pixels.reshape(-1, *pixels.shape[2:])).reshape(images, tiles, self.count - 1, -1)
        embed = x.shape[-1]
        x = x + self._of_tiles(self.before_tiles, self.before_gate, aspect_ratio_id, embed)
        class_token = jnp.broadcast_to(self.class_token[...], (images, tiles, 1, embed))
        x = jnp.concatenate([class_token, x], axis=2)
        placed = jnp.take(self.tile_positions[...], aspect_ratio_id, axis=0, mode="clip").reshape(x.shape)
        x = x + (1 - jnp.tanh(self.position_gate[...])) * self.positions[...] + through(self.position_gate, placed)
        x = self.norm_before(x)
        padding = -self.count % _ALIGNMENT
        length = self.count + padding
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))).reshape(images, tiles * length, embed)
        # Padding does not see padding, all else sees all: the model was trained with that mask.
        is_padding = (aspect_ratio_mask == 0)[:, :, None] | (jnp.arange(length) >= self.count)
        is_padding = is_padding.reshape(images, -1)
        between = []
        for name in self.local_names:
            between.append(x)  # transformers since 4.55 takes what leaves a layer; the model was not trained so
            x = self.local_layers[name](x, is_padding)
        x = self.norm_after(x).reshape(images, tiles, length, embed)
        x = x + self._of_tiles(self.after_tiles, self.after_gate, aspect_ratio_id, embed)
        x = x.reshape(images, tiles * length, embed)
        for name in self.global_names:
            x = self.global_layers[name](x, is_padding)
        # The kept layers alternate: the first feature of each, then the second of each, and so on.
        kept = jnp.stack([between[number] for number in self.kept], axis=-1)
        joined = jnp.concatenate([x, kept.reshape(*x.shape[:2], -1)], axis=-1)
        return joined.reshape(images, tiles, length, -1)[:, :, : self.count]

    def _of_tiles(self, table: nnx.Param, gate: nnx.Param, arrangement: Array, embed: int) -> Array:
        """Return [images, tiles, 1, embed]: the sum that each tile's tokens get."""
        return through(gate, jnp.take(table[...], arrangement, axis=0, mode="clip")).reshape(
            len(arrangement), -1, 1, embed
        )

    def weights(self, path: tuple[str, ...], name: str) -> Iterator[WeightSource]:
        """Yield the sources of this encoder at `path` in its model, whose tensors begin with `name`."""
        yield from self.patches.weights((*path, "patches"), f"{name}.patch_embedding")
        as_held = {
            "class_token": ("class_embedding", 1),
            "positions": ("gated_positional_embedding.embedding", 2),
            "tile_positions": ("gated_positional_embedding.tile_embedding.weight", 2),
            "position_gate": ("gated_positional_embedding.gate", 1),
            "before_tiles": ("pre_tile_positional_embedding.embedding.weight", 2),
            "before_gate": ("pre_tile_positional_embedding.gate", 1),
            "after_tiles": ("post_tile_positional_embedding.embedding.weight", 2),
            "after_gate": ("post_tile_positional_embedding.gate", 1),
        }
        for attribute, (tensor, rank) in as_held.items():
            yield whole((*path, attribute), f"{name}.{tensor}", rank)
        yield from self.norm_before.weights((*path, "norm_before"), f"{name}.layernorm_pre")
        yield from self.norm_after.weights((*path, "norm_after"), f"{name}.layernorm_post")
        for attribute, stored, names in (
            ("local_layers", "transformer", self.local_names),
            ("global_layers", "global_transformer", self.global_names),
        ):
            for number, layer in enumerate(names):
                yield from getattr(self, attribute)[layer].weights(
                    (*path, attribute, layer), f"{name}.{stored}.layers.{number}"
                )


class MllamaProjector(nnx.Module):
    """Leads to the language model's width, for the keys and values of its cross-attention; ``MllamaConfig``."""

    def __init__(self, config: Any, build: BuildContext):
        width = config.vision_config.vision_output_dim
        self.project = Linear(width, config.text_config.hidden_size, build, partition=P(None, None), bias=True)

    def __call__(self, features: Float[Array, "... features"]) -> Float[Array, "... embed"]:
        return apply(self.project, features)

    def weights(self, path: tuple[str, ...], name: str) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.weight`` and ``{name}.bias``."""
        linear = convert.linear(*self.project.weight.shape)
        yield from self.project.weights((*path, "project"), (name,), None, linear, may_quantise=False)
