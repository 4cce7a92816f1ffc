"""Computes norms and the gated MLP, which most families share.

Dimension names beyond those of `jpaged.model_api`: ``mlp`` is the MLP's width padded to a multiple of the
shards. Fused weights are fused along their columns: with a further dimension of 2 or 6, a TPU would tile them so that
every step copies them. Norms are computed in float32; everything else in the parameters' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import TENSOR_AXIS, BuildContext, WeightSource
from pallas_kernels.row_ops import add_rms_norm, gated, rms_norm
from pallas_kernels.stacked_row import StackedRow

from . import weights as convert
from .linear import Linear, LiveRows
from .parameters import LayerVector, constant_param
from .shards import each_shard
from .stack import PendingResidual

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}
"""Activation functions under the names that Hugging Face configs use."""


def scaled(x: Float[Array, "*axes"], factor: float | None) -> Float[Array, "*axes"]:
    """Return `x` times a config's multiplier, in the dtype of `x`; `x` itself for 1 and None."""
    return x if factor in (None, 1.0) else x * jnp.asarray(factor, x.dtype)


def check_activation(name: str, field: str) -> str:
    """Return `name` if it is known; raise ValueError naming the config's `field` otherwise."""
    if name not in ACTIVATIONS:
        raise ValueError(f"{field}={name!r} is not supported; known: {', '.join(sorted(ACTIVATIONS))}")
    return name


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * (offset + scale)`` over the last dimension (Zhang & Sennrich, 2019).

    `offset` is 1 for Gemma, whose checkpoints store the scale's distance from one. Without `affine` there is no scale.
    """

    def __init__(self, size: int, eps: float, build: BuildContext, *, offset: float = 0.0, affine: bool = True):
        self.scale = constant_param(build, (size,), 1.0 - offset, kind=LayerVector) if affine else None
        self.eps = eps
        self.offset = offset
        self.impl = build.product_impl

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        impl = "xla" if self._launches else self.impl
        return rms_norm(x, self._scale, self.eps, offset=self.offset, impl=impl)

    def of_whole(self, x: Float[Array, "rows size"]) -> Float[Array, "rows size"]:
        """Return the norm of rows that every tensor shard has all of, as all have of a layer's hidden states."""
        norm: Callable[..., Array] = partial(rms_norm, eps=self.eps, offset=self.offset, impl=self.impl)
        return self._on_each_shard(norm)(x, self._scale)

    def norm_residual(
        self, x: PendingResidual | Float[Array, "*batch size"]
    ) -> tuple[Float[Array, "*batch size"], ...]:
        """Return the sum, added up, and its norm; where nothing is to be added, `x` and its norm."""
        if not isinstance(x, PendingResidual):
            return x, self(x)
        add: Callable[..., tuple[Array, Array]] = partial(
            add_rms_norm, eps=self.eps, offset=self.offset, impl=self.impl
        )
        return self._on_each_shard(add)(x.hidden, x.rest, self._scale)

    @property
    def _launches(self) -> bool:
        """Tell whether a kernel is launched, which XLA cannot split for shards."""
        return self.impl in ("tpu", "tpu_interpret")

    def _on_each_shard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` for all rows, called by each shard where it launches a kernel."""
        return each_shard(function, P(), P()) if self._launches else function

    @property
    def _scale(self) -> Float[Array, " size"] | StackedRow | None:
        return None if self.scale is None else self.scale[...]

    def weights(self, path: tuple[str, ...], name: str, layer: int | None = None) -> Iterator[WeightSource]:
        """Yield the sources of this norm at `path` in its layer or model, whose tensors begin with `name`."""
        if self.scale is not None:
            yield WeightSource((*path, "scale"), (f"{name}.weight",), convert.as_stored, P(None), layer)


class LayerNorm(nnx.Module):
    """``(x - mean) / sqrt(var + eps) * (offset + scale) + bias`` over the last dimension (Ba et al., 2016).

    Without `affine` there are no parameters, as in the OPT-shaped Galactica models; Cohere's has no bias only.
    `offset` is 1 for Nemotron, see `RMSNorm`.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        build: BuildContext,
        *,
        affine: bool = True,
        bias: bool = True,
        offset: float = 0.0,
    ):
        self.scale = constant_param(build, (size,), 1.0 - offset) if affine else None
        self.bias = constant_param(build, (size,)) if affine and bias else None
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        if self.scale is not None:
            scale = self.scale[...].astype(jnp.float32)
            wide = wide * (scale if self.offset == 0.0 else scale + self.offset)
        if self.bias is not None:
            wide = wide + self.bias[...].astype(jnp.float32)
        return wide.astype(x.dtype)

    def weights(self, path: tuple[str, ...], name: str, layer: int | None = None) -> Iterator[WeightSource]:
        """Yield the sources of this norm; see `RMSNorm.weights`."""
        if self.scale is not None:
            yield WeightSource((*path, "scale"), (f"{name}.weight",), convert.as_stored, P(None), layer)
        if self.bias is not None:
            yield WeightSource((*path, "bias"), (f"{name}.bias",), convert.as_stored, P(None), layer)


MLP_NAMES = ("gate_proj", "up_proj", "down_proj")
"""Names of a gated MLP's matrices in most checkpoints."""


class GatedMLP(nnx.Module):
    """``down(act(gate(x)) * up(x))`` (Shazeer, 2020), gate and up fused into one product.

    gate_up [embed, 2 * mlp] holds each shard's gate columns and then its up columns, so that a shard finds both in
    its own part; down [mlp, embed]. Columns beyond the checkpoint's width are zero.

    Args:
        bias: whether the products have biases.
        down_bias: whether the second one has, if that differs; None = it does not.
    """

    def __init__(
        self,
        embed: int,
        width: int,
        activation: str,
        build: BuildContext,
        *,
        bias: bool,
        down_bias: bool | None = None,
    ):
        self.width = convert.Padded(width, build.tensor_parallel)
        mlp = self.width.size
        self.gate_up = Linear(embed, 2 * mlp, build, partition=P(None, TENSOR_AXIS), bias=bias)
        of_down = bias if down_bias is None else down_bias
        self.down = Linear(mlp, embed, build, partition=P(TENSOR_AXIS, None), bias=of_down)
        self.activation = activation
        self.shards = build.tensor_parallel
        self.impl = build.product_impl

    def __call__(self, x: Float[Array, "tokens embed"], live_rows: LiveRows = None) -> Float[Array, "tokens embed"]:
        return self.down(self._inner(self.gate_up(x, live_rows)), live_rows)

    def _inner(self, both: Float[Array, "tokens gate_up"]) -> Float[Array, "tokens mlp"]:
        """Return the activated gates times the values that they gate."""
        inner = gated(both, self.activation, impl=self.impl) if self.shards == 1 else None
        if inner is not None:
            return inner
        gate, up = jnp.split(both.reshape(both.shape[0], self.shards, -1), 2, axis=-1)
        return (ACTIVATIONS[self.activation](gate) * up).reshape(both.shape[0], -1)

    def weights(
        self,
        path: tuple[str, ...],
        name: str,
        layer: int | None,
        names: tuple[str, ...] = MLP_NAMES,
    ) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.gate_proj``, ``.up_proj`` and ``.down_proj``, or what `names` calls
        them; with two names, the first tensor has the rows of gate, then those of up."""
        embed, (*both, out) = self.down.weight.shape[-1], names
        fuse, down = convert.fuse_gate_up(self.width), convert.linear(self.width, embed)
        if len(both) == 1:
            fuse = convert.split_in_turn(2, self.width)
        yield from self.gate_up.weights((*path, "gate_up"), [f"{name}.{part}" for part in both], layer, fuse, fuse)
        yield from self.down.weights((*path, "down"), (f"{name}.{out}",), layer, down)


class XIELU(nnx.Module):
    """``p x^2 + b x`` above zero, ``n (exp(min(x, e)) - 1 - x) + b x`` below, with a layer's own numbers (Huang and
    Schlag, 2024).

    numbers [4]: alpha_p, alpha_n, b and e; p is ``softplus(alpha_p)``, n is ``b + softplus(alpha_n)``.
    """

    name = "xielu"

    def __init__(self, build: BuildContext):
        self.numbers = constant_param(build, (4,))

    def __call__(self, x: Float[Array, "tokens mlp"]) -> Float[Array, "tokens mlp"]:
        above, below, linear, end = self.numbers[...].astype(jnp.float32)
        wide = x.astype(jnp.float32)
        high = jax.nn.softplus(above) * wide * wide
        low = (jnp.expm1(jnp.minimum(wide, end)) - wide) * (linear + jax.nn.softplus(below))
        return (jnp.where(wide > 0, high, low) + linear * wide).astype(x.dtype)

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the source of the four tensors ``{name}.alpha_p`` and so on, each one number."""

        def convert_all(*stored: np.ndarray) -> np.ndarray:
            return np.concatenate([np.asarray(number).reshape(1) for number in stored])

        tensors = tuple(f"{name}.{part}" for part in ("alpha_p", "alpha_n", "beta", "eps"))
        yield WeightSource((*path, "numbers"), tensors, convert_all, P(None), layer)


class FeedForward(nnx.Module):
    """``down(act(up(x)))``; up [embed, mlp], down [mlp, embed], columns beyond the checkpoint's are zero.

    Args:
        activation: a key of `ACTIVATIONS`, or "xielu".
    """

    def __init__(self, embed: int, width: int, activation: str, build: BuildContext, *, bias: bool):
        self.width = convert.Padded(width, build.tensor_parallel)
        self.up = Linear(embed, self.width.size, build, partition=P(None, TENSOR_AXIS), bias=bias)
        self.down = Linear(self.width.size, embed, build, partition=P(TENSOR_AXIS, None), bias=bias)
        self.own = XIELU(build) if activation == XIELU.name else None
        self.activation = activation

    def __call__(self, x: Float[Array, "tokens embed"], live_rows: LiveRows = None) -> Float[Array, "tokens embed"]:
        activate = ACTIVATIONS[self.activation] if self.own is None else self.own
        return self.down(activate(self.up(x, live_rows)), live_rows)

    def weights(
        self, path: tuple[str, ...], name: str, layer: int, names: tuple[str, ...] = ("fc1", "fc2")
    ) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.fc1`` and ``{name}.fc2``, or what `names` calls them."""
        embed, (first, last) = self.down.weight.shape[-1], names
        up, down = convert.linear(embed, self.width), convert.linear(self.width, embed)
        yield from self.up.weights((*path, "up"), (f"{name}.{first}",), layer, up, convert.pad_rows(self.width))
        yield from self.down.weights((*path, "down"), (f"{name}.{last}",), layer, down)
        if self.own is not None:
            yield from self.own.weights((*path, "own"), f"{name}.act_fn", layer)
