"""The short convolution of LFM2 (Liquid AI, 2025): a gated convolution over a few tokens, which is all it remembers.

Channels are split over the tensor shards; one sum crosses them, after the projection out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import TENSOR_AXIS, BuildContext, LayerRef, Recur, StatePart, WeightSource, padded

from .. import weights as convert
from ..linear import Linear
from ..stack import Shared
from .convolution import CausalConv, conv_state


class ShortConv(nnx.Module):
    """``out(c * conv(b * x))``, b, c and x being three projections of the token.

    Parameters: project [embed, 3 * channels], each shard's b, c and x; out [channels, embed]. There are as many
    channels as the residual stream is wide; those beyond have weights of zero.
    """

    def __init__(self, embed: int, width: int, build: BuildContext, *, bias: bool):
        self.channels = convert.Padded(embed, build.tensor_parallel)
        channels = self.channels.size
        self.project = Linear(embed, 3 * channels, build, partition=P(None, TENSOR_AXIS), bias=bias)
        self.conv = CausalConv(channels, width, build, bias=bias, activation=None)
        self.out = Linear(channels, embed, build, partition=P(TENSOR_AXIS, None), bias=bias)
        self.shards = build.tensor_parallel

    @staticmethod
    def state_parts(embed: int, width: int, build: BuildContext) -> tuple[StatePart, ...]:
        """Return the parts of the state that a layer keeps of a sequence."""
        return (conv_state(padded(embed, build.tensor_parallel), width, build),)

    def __call__(
        self, x: Float[Array, "tokens embed"], shared: Shared, cache: Any, ref: LayerRef, attend: Recur
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        fused = self.project(x, shared.live_rows).reshape(len(x), self.shards, -1)
        b, c, inner = (part.reshape(len(x), -1) for part in jnp.split(fused, 3, axis=-1))
        mixed, cache = self.conv(b * inner, cache, ref, attend)
        return self.out(c * mixed, shared.live_rows), cache

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.in_proj``, ``.conv`` and ``.out_proj``."""
        channels, embed = self.channels, self.out.weight.shape[-1]
        in_turn, out = convert.split_in_turn(3, channels), convert.linear(channels, embed)
        yield from self.project.weights((*path, "project"), (f"{name}.in_proj",), layer, in_turn, in_turn)
        yield from self.conv.weights((*path, "conv"), f"{name}.conv", layer, convert.pad_axis(0, channels))
        yield from self.out.weights((*path, "out"), (f"{name}.out_proj",), layer, out)
