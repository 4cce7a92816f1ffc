"""Lead from SigLIP's vectors to the language model's embeddings: Gemma 3's and LLaVA-OneVision's way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import TENSOR_AXIS, BuildContext, WeightSource

from .. import weights as convert
from ..layers import ACTIVATIONS, RMSNorm, check_activation
from ..linear import Linear
from ..parameters import random_param
from .encoder import apply, whole


class Gemma3Projector(nnx.Module):
    """Averages squares of patches, norms the averages and multiplies them; `config` is a ``Gemma3Config``."""

    def __init__(self, config: Any, build: BuildContext):
        vision, tokens = config.vision_config, config.mm_tokens_per_image
        self.patches = vision.image_size // vision.patch_size
        self.side = math.isqrt(tokens)
        if self.side**2 != tokens or self.patches % self.side:
            raise ValueError(
                f"mm_tokens_per_image={tokens} is not a square whose side divides the {self.patches} patches of an "
                "image's side"
            )
        self.norm = RMSNorm(vision.hidden_size, vision.layer_norm_eps, build, offset=1.0)
        width = config.text_config.hidden_size
        self.project = Linear(vision.hidden_size, width, build, partition=P(None, None))

    def __call__(self, features: Float[Array, "images patches vision"]) -> Float[Array, "images tokens embed"]:
        images, _, width = features.shape
        each = self.patches // self.side
        squares = features.reshape(images, self.side, each, self.side, each, width)
        averages = squares.mean(axis=(2, 4), dtype=jnp.float32).astype(features.dtype)
        return apply(self.project, self.norm(averages.reshape(images, -1, width)))

    def weights(self, path: tuple[str, ...], name: str) -> Iterator[WeightSource]:
        """Yield the sources of the tensors that begin with `name`; the matrix is stored in the parameter's layout."""
        yield from self.norm.weights((*path, "norm"), f"{name}.mm_soft_emb_norm")
        yield whole((*path, "project", "weight"), f"{name}.mm_input_projection_weight", 2)


class LlavaOnevisionProjector(nnx.Module):
    """Two layers, and the newline that ends each row of a picture; `config` is a ``LlavaOnevisionConfig``.

    Parameters: up [vision, columns], down [columns, embed], newline [embed].
    """

    def __init__(self, config: Any, build: BuildContext):
        if config.vision_feature_layer != -1:
            raise ValueError(f"vision_feature_layer={config.vision_feature_layer} is not supported, only -1")
        width, bias = config.text_config.hidden_size, config.multimodal_projector_bias
        self.columns = convert.Padded(width, build.tensor_parallel)
        columns = self.columns.size
        self.up = Linear(config.vision_config.hidden_size, columns, build, partition=P(None, TENSOR_AXIS), bias=bias)
        self.down = Linear(columns, width, build, partition=P(TENSOR_AXIS, None), bias=bias)
        self.newline = random_param(build, (width,))
        self.activation = check_activation(config.projector_hidden_act, "projector_hidden_act")

    def __call__(self, features: Float[Array, "tiles patches vision"]) -> Float[Array, "tiles patches embed"]:
        """Return each patch in the language model's width."""
        return apply(self.down, ACTIVATIONS[self.activation](apply(self.up, features)))

    def pack(
        self,
        projected: Float[Array, "tiles patches embed"],
        rows: Int[Array, "tokens 4"],
        weights: Float[Array, "tokens 4"],
    ) -> Float[Array, "tokens embed"]:
        """Return one picture's tokens: each a weighted sum of four rows, summed in float32.

        Args:
            projected: the picture's tiles, the overview first; later tiles may be padding.
            rows: row 0 is the newline, ``1 + tile * patches + patch`` a patch.
        """
        table = jnp.concatenate([self.newline[...][None], projected.reshape(-1, projected.shape[-1])])
        taken = jnp.take(table, rows, axis=0, mode="clip").astype(jnp.float32)
        return (taken * weights[..., None]).sum(axis=1).astype(projected.dtype)

    def weights(self, path: tuple[str, ...], name: str, newline: str) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.linear_1`` and ``.linear_2``, and of `newline`."""
        columns, width = self.columns, self.down.weight.shape[-1]
        up, down = convert.linear(self.up.weight.shape[0], columns), convert.linear(columns, width)
        bias = convert.pad_rows(columns)
        yield from self.up.weights((*path, "up"), (f"{name}.linear_1",), None, up, bias, may_quantise=False)
        yield from self.down.weights((*path, "down"), (f"{name}.linear_2",), None, down, may_quantise=False)
        yield whole((*path, "newline"), newline, 1)
