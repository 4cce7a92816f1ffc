"""Parts of towers that take one packed row: patches of several images, with the starts of their segments.

A tower is a stem, which makes a hidden state of each patch, a `LayerStack`, whose layers attend within segments, and a
merger, which makes features of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import (
    TENSOR_AXIS,
    Attend,
    AttendWithinSegments,
    BuildContext,
    RowArray,
    RowLayout,
    SegmentKind,
    WeightSource,
)

from .. import weights as convert
from ..attention import Heads, plainly
from ..encoder import EncoderLayer, EncoderSpec
from ..layers import ACTIVATIONS, LayerNorm, RMSNorm
from ..linear import Linear, LiveRows
from ..rope import Rotary
from ..stack import LayerStack


def layers_of(spec: EncoderSpec, build: BuildContext, *, rotates_neighbours: bool = False) -> LayerStack:
    """Return a tower's layers, which are an encoder's; the group of a kind is the name of its segments.

    Args:
        rotates_neighbours: see `Heads`.
    """
    if spec.size % spec.num_heads:
        raise ValueError(f"hidden_size={spec.size} of the tower is not a multiple of its {spec.num_heads} heads")
    width = spec.size // spec.num_heads
    heads = Heads.of(spec.num_heads, spec.num_heads, width, build, rotates_neighbours=rotates_neighbours)
    return LayerStack(spec.kinds, lambda kind, build: EncoderLayer(spec, kind, heads, build), build)


def layer_weights(layers: LayerStack, path: tuple[str, ...], name: str) -> Iterator[WeightSource]:
    """Yield the sources of a tower's layers, whose tensors begin with ``{name}.0.`` and so on."""
    for number in range(len(layers.kinds)):
        for source in layers.layer(number).weights(f"{name}.{number}", number):
            yield as_floats(replace(source, path=(*path, *source.path)))


def as_floats(source: WeightSource) -> WeightSource:
    """Return a source whose parameter is neither quantised nor adapted, as none of a tower's is."""
    return replace(source, contracted=None, tiled=False, bfloat16_tiles=None, adaptable=False)


def within(attend: AttendWithinSegments) -> Attend:
    """Return the engine's attention within segments as layers call it, whose groups are the segments' names."""

    return plainly(lambda cache, group, q, k, v, scale: (cache, attend(group, q, k, v, scale=scale)))


def axial(head_dim: int, theta: float) -> Rotary:
    """Return the frequencies of heads of which a half is rotated by a patch's row and the other by its column."""
    if head_dim % 4:
        raise ValueError(f"heads of {head_dim} numbers cannot be rotated by two axes: they are no multiple of 4")
    pairs = head_dim // 4
    frequencies = [theta ** (-2 * pair / (head_dim // 2)) for pair in range(pairs)]
    return Rotary(tuple(frequencies * 2), axes=(0,) * pairs + (1,) * pairs)


def row_of_patches(channels: int, numbers: int, merge: int, *segments: SegmentKind, places: int = 4) -> RowLayout:
    """Return how a row holds patches that keep their bytes, with what these are scaled by.

    Args:
        numbers: of a patch's channel.
        merge, segments: see `RowLayout`.
        places: numbers that say where a patch is.
    """
    patches = RowArray("pixels", (channels * numbers,), "uint8"), RowArray("places", (places,), "int16")
    constants = RowArray("scale", (channels,), "float32"), RowArray("shift", (channels,), "float32")
    return RowLayout(patches, constants, segments, merge)


def scaled_pixels(
    pixels: Int[Array, "patches numbers"], scale: Float[Array, " channels"], shift: Float[Array, " channels"]
) -> Float[Array, "patches numbers"]:
    """Return the numbers of patches' bytes, which lie channel by channel."""
    each = pixels.reshape(len(pixels), len(scale), -1).astype(jnp.float32)
    return (each * scale[:, None] + shift[:, None]).reshape(pixels.shape)


def channels_first(channels: int) -> convert.Converter:
    """Return a converter of an array whose last axis has the channels of each pixel in turn, to channel by channel."""

    def turned(stored: Any) -> Any:
        pixels = stored.reshape(*stored.shape[:-1], -1, channels)
        return pixels.swapaxes(-2, -1).reshape(stored.shape)

    return turned


class PixelStem(nnx.Module):
    """Scales a patch's bytes and projects them; a convolution whose stride is its width."""

    def __init__(self, channels: int, numbers: int, embed: int, build: BuildContext, *, bias: bool):
        self.project = Linear(channels * numbers, embed, build, partition=P(None, None), bias=bias)
        self.channels = channels

    def __call__(
        self,
        pixels: Int[Array, "patches numbers"],
        scale: Float[Array, " channels"],
        shift: Float[Array, " channels"],
        live_rows: LiveRows,
    ) -> Float[Array, "patches embed"]:
        """Return a vector for each patch."""
        numbers = scaled_pixels(pixels, scale, shift)
        return self.project(numbers.astype(self.project.weight.dtype), live_rows)

    def weights(self, path: tuple[str, ...], name: str, *, channels_last: bool = False) -> Iterator[WeightSource]:
        """Yield the sources of the convolution ``{name}``, [embed, channels, ...], or of a matrix whose inputs have the
        channels of each pixel in turn."""

        def flat(kernel: Any) -> Any:
            kernel = kernel.reshape(len(kernel), -1)
            return (channels_first(self.channels)(kernel) if channels_last else kernel).T

        yield from self.project.weights((*path, "project"), (name,), None, flat, may_quantise=False)


class SquareMerger(nnx.Module):
    """``down(act(up(norm(x))))`` of the patches of a square together.

    Args:
        norm: a norm of patches, or of squares; None = there is none.
        merge: patches of a square.
        width: of a feature.
        activation: a key of `ACTIVATIONS`.
        columns: of what is between the two layers; None = those of a square.
        bias: whether the layers have biases.
    """

    def __init__(
        self,
        norm: LayerNorm | RMSNorm | None,
        embed: int,
        merge: int,
        width: int,
        build: BuildContext,
        *,
        activation: str = "gelu",
        of_squares: bool = False,
        columns: int | None = None,
        bias: bool = True,
    ):
        self.norm = norm
        self.columns = convert.Padded(columns or embed * merge, build.tensor_parallel)
        inner = self.columns.size
        self.up = Linear(embed * merge, inner, build, partition=P(None, TENSOR_AXIS), bias=bias)
        self.down = Linear(inner, width, build, partition=P(TENSOR_AXIS, None), bias=bias)
        self.merge = merge
        self.activation = activation
        self.of_squares = of_squares

    def __call__(self, x: Float[Array, "patches embed"], live_rows: LiveRows) -> Float[Array, "features width"]:
        """Return a vector for each square; `live_rows` counts squares."""
        if self.norm is not None and not self.of_squares:
            x = self.norm(x)
        x = x.reshape(len(x) // self.merge, -1)
        if self.norm is not None and self.of_squares:
            x = self.norm(x)
        return self.down(ACTIVATIONS[self.activation](self.up(x, live_rows)), live_rows)

    def weights(self, path: tuple[str, ...], *, layers: Sequence[str], norm: str = "") -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{norm}.weight`` and so on, and of the two `layers`."""
        columns, width = self.columns, self.down.weight.shape[-1]
        up, down = convert.linear(self.up.weight.shape[0], columns), convert.linear(columns, width)
        if self.norm is not None:
            yield from self.norm.weights((*path, "norm"), norm)
        bias = convert.pad_rows(columns)
        yield from self.up.weights((*path, "up"), (layers[0],), None, up, bias, may_quantise=False)
        yield from self.down.weights((*path, "down"), (layers[1],), None, down, may_quantise=False)
