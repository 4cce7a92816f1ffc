"""Parts of Llama 3.2 Vision's encoder: patches, bidirectional attention, an MLP, and layers of these.

Dimension names beyond those of `jpaged.model_api`: ``images`` of a batch (or tiles), ``patches`` of an image (or
whatever else a layer's tokens are), ``heads`` padded to a multiple of the shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from jpaged.model_api import TENSOR_AXIS, BuildContext, WeightSource

from .. import weights as convert
from ..attention import Heads
from ..layers import ACTIVATIONS, LayerNorm, check_activation
from ..linear import Linear
from ..parameters import constant_param

QUERIES_AT_ONCE = 1024
"""Tokens of an image that attend at a time."""


class Patches(nnx.Module):
    """A convolution whose stride is its width, so a product: patches of ``channels * size * size`` numbers -> embed.

    What a patch does not reach at the right and lower border is left out.
    """

    def __init__(self, channels: int, size: int, embed: int, build: BuildContext):
        self.project = Linear(channels * size * size, embed, build, partition=P(None, None))
        self.size = size

    def __call__(self, pixels: Float[Array, "images channels height width"]) -> Float[Array, "images patches embed"]:
        """Return one vector a patch, row by row."""
        images, channels, height, width = pixels.shape
        rows, columns, size = height // self.size, width // self.size, self.size
        pixels = pixels[:, :, : rows * size, : columns * size].astype(self.project.weight.dtype)
        cut = pixels.reshape(images, channels, rows, size, columns, size).transpose(0, 2, 4, 1, 3, 5)
        return apply(self.project, cut.reshape(images, rows * columns, -1))

    def weights(self, path: tuple[str, ...], name: str) -> Iterator[WeightSource]:
        """Yield the sources of the convolution ``{name}``, [embed, channels, size, size]."""

        def flat(kernel: np.ndarray) -> np.ndarray:
            return kernel.reshape(len(kernel), -1).T

        yield from self.project.weights((*path, "project"), (name,), None, flat, may_quantise=False)


class VisionAttention(nnx.Module):
    """Bidirectional attention of an image's tokens to each other; heads are split over the shards.

    Parameters: qkv [embed, heads * 3 * head_dim], head by head; out [heads * head_dim, embed]. Padding heads are zero.
    """

    def __init__(self, embed: int, heads: int, build: BuildContext):
        if embed % heads:
            raise ValueError(f"hidden_size={embed} of the vision encoder is not a multiple of its {heads} heads")
        self.heads = Heads.of(heads, heads, embed // heads, build)
        columns = self.heads.layout.kv_heads * self.heads.head_dim
        self.qkv = Linear(embed, 3 * columns, build, partition=P(None, TENSOR_AXIS))
        self.out = Linear(columns, embed, build, partition=P(TENSOR_AXIS, None))

    def __call__(
        self, x: Float[Array, "images patches embed"], padding: Bool[Array, "images patches"] | None
    ) -> Float[Array, "images patches embed"]:
        """Attend to all tokens, but from `padding` to padding."""
        fused = apply(self.qkv, x).reshape(*x.shape[:2], -1, 3, self.heads.head_dim)
        q, k, v = (fused[..., part, :] for part in range(3))
        return apply(self.out, bidirectional(q, k, v, padding).reshape(*x.shape[:2], -1))

    def weights(self, path: tuple[str, ...], name: str) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.q_proj`` and so on."""
        layout, count, width = self.heads.layout, self.heads.num_heads, self.heads.head_dim
        fuse, split = convert.fuse_qkv(layout, count, count, width), convert.split_out(layout, count, width)
        qkv = [f"{name}.{part}_proj" for part in "qkv"]
        yield from self.qkv.weights((*path, "qkv"), qkv, None, fuse, fuse, may_quantise=False)
        yield from self.out.weights((*path, "out"), (f"{name}.o_proj",), None, split, may_quantise=False)


class VisionMLP(nnx.Module):
    """``down(act(up(x)))`` with biases; columns beyond the checkpoint's are zero."""

    def __init__(self, embed: int, width: int, activation: str, build: BuildContext):
        self.width = convert.Padded(width, build.tensor_parallel)
        mlp = self.width.size
        self.up = Linear(embed, mlp, build, partition=P(None, TENSOR_AXIS), bias=True)
        self.down = Linear(mlp, embed, build, partition=P(TENSOR_AXIS, None), bias=True)
        self.activation = check_activation(activation, "vision_config.hidden_act")

    def __call__(self, x: Float[Array, "images patches embed"]) -> Float[Array, "images patches embed"]:
        return apply(self.down, ACTIVATIONS[self.activation](apply(self.up, x)))

    def weights(self, path: tuple[str, ...], name: str) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.fc1`` and ``{name}.fc2``."""
        mlp, embed = self.width, self.down.weight.shape[-1]
        up, down, bias = convert.linear(embed, mlp), convert.linear(mlp, embed), convert.pad_rows(mlp)
        yield from self.up.weights((*path, "up"), (f"{name}.fc1",), None, up, bias, may_quantise=False)
        yield from self.down.weights((*path, "down"), (f"{name}.fc2",), None, down, may_quantise=False)


class VisionLayer(nnx.Module):
    """``x += gate * attention(norm(x)); x += gate * mlp(norm(x))``; each gate is a tanh of one number, or is left out.

    Args:
        config: the vision encoder's config.
    """

    def __init__(self, config: Any, build: BuildContext, *, gated: bool):
        embed, eps = config.hidden_size, config.norm_eps
        self.attention_norm = LayerNorm(embed, eps, build)
        self.attention = VisionAttention(embed, config.attention_heads, build)
        self.mlp_norm = LayerNorm(embed, eps, build)
        self.mlp = VisionMLP(embed, config.intermediate_size, config.hidden_act, build)
        self.attention_gate = constant_param(build, (1,)) if gated else None
        self.mlp_gate = constant_param(build, (1,)) if gated else None

    def __call__(
        self, x: Float[Array, "images patches embed"], padding: Bool[Array, "images patches"] | None = None
    ) -> Float[Array, "images patches embed"]:
        x = x + through(self.attention_gate, self.attention(self.attention_norm(x), padding))
        return x + through(self.mlp_gate, self.mlp(self.mlp_norm(x)))

    def weights(self, path: tuple[str, ...], name: str) -> Iterator[WeightSource]:
        """Yield the sources of the layer whose tensors begin with `name`."""
        yield from self.attention_norm.weights((*path, "attention_norm"), f"{name}.input_layernorm")
        yield from self.attention.weights((*path, "attention"), f"{name}.self_attn")
        yield from self.mlp_norm.weights((*path, "mlp_norm"), f"{name}.post_attention_layernorm")
        yield from self.mlp.weights((*path, "mlp"), f"{name}.mlp")
        if self.attention_gate is not None:
            yield whole((*path, "attention_gate"), f"{name}.gate_attn", 1)
            yield whole((*path, "mlp_gate"), f"{name}.gate_ffn", 1)


def bidirectional(
    q: Float[Array, "images patches heads head_dim"],
    k: Float[Array, "images patches heads head_dim"],
    v: Float[Array, "images patches heads head_dim"],
    padding: Bool[Array, "images patches"] | None,
) -> Float[Array, "images patches heads head_dim"]:
    """Attend from each token to all tokens of its image; with `padding`, only to tokens that are no padding.

    The scores of `QUERIES_AT_ONCE` tokens exist at a time: all those of an image of Llama 3.2 Vision take 2.6 GB.
    """
    images, patches = q.shape[:2]
    flags = jnp.zeros((images, patches), bool) if padding is None else padding
    exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def some(given: tuple[Array, Array]) -> Array:
        queries, of_padding = given
        scores = jnp.einsum("iqhd,ikhd->ihqk", queries, k, precision=exact, preferred_element_type=jnp.float32)
        scores = scores * q.shape[-1] ** -0.5
        if padding is not None:
            blocked = of_padding[:, None, :, None] & padding[:, None, None, :]
            scores = jnp.where(blocked, jnp.finfo(jnp.float32).min, scores)
        share = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("ihqk,ikhd->iqhd", share, v, precision=exact)

    if patches <= QUERIES_AT_ONCE:
        return some((q, flags))
    missing = -patches % QUERIES_AT_ONCE

    def in_turn(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(images, -1, QUERIES_AT_ONCE, *x.shape[2:]), 1, 0)

    parts = jax.lax.map(some, (in_turn(q), in_turn(flags)))
    return jnp.moveaxis(parts, 0, 1).reshape(images, patches + missing, *q.shape[2:])[:, :patches]


def apply(linear: Linear, x: Float[Array, "... inputs"]) -> Float[Array, "... outputs"]:
    """Multiply along the last axis; the others may be any."""
    return linear(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def through(gate: nnx.Param | None, x: Array) -> Array:
    """Return ``tanh(gate) * x``, or `x` where there is no gate."""
    return x if gate is None else jnp.tanh(gate[...]) * x


def whole(path: tuple[str, ...], tensor: str, rank: int) -> WeightSource:
    """Return the source of a parameter of `rank` axes that is stored in the same layout, and that every shard holds
    whole."""
    return WeightSource(path, (tensor,), convert.as_stored, P(*[None] * rank))


def layer_names(count: int) -> tuple[str, ...]:
    """Return the names of an encoder's layers in its `nnx.Dict`."""
    return tuple(f"layer_{number}" for number in range(count))
