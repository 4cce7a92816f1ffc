"""Convolves each channel of a mixer over the last tokens of its sequence, and keeps their inputs as state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import TENSOR_AXIS, BuildContext, LayerRef, Recur, StatePart, WeightSource
from pallas_kernels.recurrent import causal_conv

from ..parameters import constant_param, random_param
from ..per_layer_weights import matrix_of
from ..weights import Converter
from .slots import of_channels

PART = "conv"
"""The name of its state: each channel's last inputs, in the parameters' dtype."""


class CausalConv(nnx.Module):
    """Gives each channel the weighted sum of its last `width` inputs of the sequence.

    Parameters: weight [channels, width]; bias [channels].

    Args:
        channels: over all tensor shards, which split them.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        build: BuildContext,
        *,
        bias: bool,
        activation: Literal["silu"] | None,
    ):
        self.weight = random_param(build, (channels, width))
        self.bias = constant_param(build, (channels,)) if bias else None
        self.activation = activation

    def __call__(
        self, x: Float[Array, "tokens channels"], cache: Any, ref: LayerRef, attend: Recur
    ) -> tuple[Float[Array, "tokens channels"], Any]:
        weight, bias = matrix_of(self.weight[...]), None if self.bias is None else self.bias[...]
        axes = (1, 0, None if bias is None else 0)
        cache, out = attend(
            cache, ref, PART, causal_conv, x, weight, bias, axes=axes, out_axis=1, activation=self.activation
        )
        return out, cache

    def weights(self, path: tuple[str, ...], name: str, layer: int, convert: Converter) -> Iterator[WeightSource]:
        """Yield the sources of ``{name}.weight`` and ``{name}.bias``, whose channels `convert` places."""
        by_channel = P(TENSOR_AXIS)
        weight = of_channels(convert)
        yield WeightSource((*path, "weight"), (f"{name}.weight",), weight, P(TENSOR_AXIS, None), layer)
        if self.bias is not None:
            yield WeightSource((*path, "bias"), (f"{name}.bias",), convert, by_channel, layer)


def conv_state(channels: int, width: int, build: BuildContext) -> StatePart:
    """Return the state of a `CausalConv`.

    Raises:
        ValueError: the convolution is of one input, which leaves nothing to be kept.
    """
    if width < 2:
        raise ValueError(f"a convolution of width {width} keeps no inputs; it must be at least 2 wide")
    return StatePart(PART, (channels, width - 1), np.dtype(build.dtype).name)


def check_silu(name: str, field: str = "hidden_act") -> None:
    """Raise ValueError naming the config's `field` unless it is the activation that convolutions of mixers end with."""
    if name not in ("silu", "swish"):
        raise ValueError(f"{field}={name!r} is not supported after a convolution; only 'silu'")
