"""SigLIP's vision encoder (Zhai et al., 2023), of Gemma 3 and LLaVA-OneVision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jpaged.model_api import BuildContext, WeightSource

from ..layers import LayerNorm
from ..parameters import random_param
from .encoder import Patches, VisionLayer, layer_names, whole


class SiglipVision(nnx.Module):
    """A vision transformer without a class token, whose pooling head is not used.

    Args:
        config: a Hugging Face ``SiglipVisionConfig``.
        final_norm: whether the last layer's result is normed, as Gemma 3 takes it; LLaVA-OneVision takes it before.
    """

    def __init__(self, config: Any, build: BuildContext, *, final_norm: bool):
        embed, eps = config.hidden_size, config.layer_norm_eps
        self.patches = Patches(config.num_channels, config.patch_size, embed, build, bias=True)
        self.positions = random_param(build, ((config.image_size // config.patch_size) ** 2, embed))
        names = layer_names(config.num_hidden_layers)
        heads = config.num_attention_heads
        self.layers = nnx.Dict({name: VisionLayer(config, heads, eps, build, bias=True) for name in names})
        self.layer_names = names
        self.norm = LayerNorm(embed, eps, build) if final_norm else None
        self.image_shape = (config.num_channels, config.image_size, config.image_size)

    def __call__(self, pixels: Float[Array, "images channels height width"]) -> Float[Array, "images patches embed"]:
        """Return a vector for each patch, row by row.

        Raises:
            ValueError: the pixels are not of the config's channels and image size.
        """
        if pixels.shape[1:] != self.image_shape:
            raise ValueError(f"pixels.shape={pixels.shape}, the encoder takes [images, {self.image_shape}]")
        x = self.patches(pixels) + self.positions[...]
        for name in self.layer_names:
            x = self.layers[name](x)
        return x if self.norm is None else self.norm(x)

    def weights(self, path: tuple[str, ...], name: str) -> Iterator[WeightSource]:
        """Yield the sources of this encoder at `path` in its model, whose tensors begin with `name`.

        They do not name the tensors of the pooling head, and of the final norm only where it is used.
        """
        yield from self.patches.weights((*path, "patches"), f"{name}.embeddings.patch_embedding")
        yield whole((*path, "positions"), f"{name}.embeddings.position_embedding.weight", 2)
        for number, layer in enumerate(self.layer_names):
            yield from self.layers[layer].weights(
                (*path, "layers", layer),
                f"{name}.encoder.layers.{number}",
                norms=("layer_norm1", "layer_norm2"),
                out_name="out_proj",
            )
        if self.norm is not None:
            yield from self.norm.weights((*path, "norm"), f"{name}.post_layernorm")
