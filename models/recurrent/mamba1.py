"""The mixer of Mamba (Gu & Dao, 2023), in Jamba's form: with norms of the token-dependent parameters.

Channels are split over the tensor shards. Two sums cross them: the projection to step size, B and C, a few hundred
numbers a token that all channels share, and the projection out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import TENSOR_AXIS, BuildContext, LayerRef, Recur, StatePart, WeightSource
from pallas_kernels.recurrent import selective_scan

from .. import weights as convert
from ..layers import RMSNorm
from ..linear import Linear
from ..parameters import wide_param
from ..per_layer_weights import matrix_of
from ..stack import Shared
from .convolution import CausalConv, conv_state

_SCAN = "scan"


@dataclass(frozen=True)
class Mamba1Sizes:
    """Describes a mixer.

    Attributes:
        embed, inner: width of the residual stream, and number of channels.
        state: numbers that each channel keeps.
        rank: numbers that the step sizes of all channels are projected from.
        conv_width: inputs of the convolution.
        conv_bias, proj_bias: whether the convolution, and the projections in and out, have biases.
        eps: of the norms.
    """

    embed: int
    inner: int
    state: int
    rank: int
    conv_width: int
    conv_bias: bool
    proj_bias: bool
    eps: float

    def channels(self, shards: int) -> convert.Padded:
        """Return the number of channels over so many shards."""
        return convert.Padded(self.inner, shards)

    def state_parts(self, build: BuildContext) -> tuple[StatePart, ...]:
        """Return the parts of the state that a layer keeps of a sequence."""
        channels = self.channels(build.tensor_parallel).size
        return conv_state(channels, self.conv_width, build), StatePart(_SCAN, (channels, self.state))


class Mamba1(nnx.Module):
    """``out(scan(silu(conv(x))) * silu(z))``, x and z being two projections of the token.

    Parameters: project [embed, 2 * channels], each shard's x and then its z; select [channels, rank + 2 * state], the
    step size's, B and C; norms of the three; step [rank, channels]; step_bias and skip [channels], log_decay
    [channels, state] in float32; out [channels, embed]. Channels beyond the checkpoint's have weights of zero.
    """

    def __init__(self, sizes: Mamba1Sizes, build: BuildContext):
        channels = sizes.channels(build.tensor_parallel).size
        by_column, by_row = P(None, TENSOR_AXIS), P(TENSOR_AXIS, None)
        self.project = Linear(sizes.embed, 2 * channels, build, partition=by_column, bias=sizes.proj_bias)
        self.conv = CausalConv(channels, sizes.conv_width, build, bias=sizes.conv_bias, activation="silu")
        self.select = Linear(channels, sizes.rank + 2 * sizes.state, build, partition=by_row)
        self.step_norm = RMSNorm(sizes.rank, sizes.eps, build)
        self.b_norm = RMSNorm(sizes.state, sizes.eps, build)
        self.c_norm = RMSNorm(sizes.state, sizes.eps, build)
        self.step = Linear(sizes.rank, channels, build, partition=by_column)
        self.step_bias = wide_param((channels,))
        self.log_decay = wide_param((channels, sizes.state))
        self.skip = wide_param((channels,), 1.0)
        self.out = Linear(channels, sizes.embed, build, partition=by_row, bias=sizes.proj_bias)
        self.sizes, self.shards = sizes, build.tensor_parallel

    def __call__(
        self, x: Float[Array, "tokens embed"], shared: Shared, cache: Any, ref: LayerRef, attend: Recur
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        tokens, rank, state, live = len(x), self.sizes.rank, self.sizes.state, shared.live_rows
        both = self.project(x, live).reshape(tokens, self.shards, -1)
        inner, gate = (part.reshape(tokens, -1) for part in jnp.split(both, 2, axis=-1))
        inner, cache = self.conv(inner, cache, ref, attend)
        step, b, c = jnp.split(self.select(inner, live), (rank, rank + state), axis=-1)
        step = self.step(self.step_norm(step), live).astype(jnp.float32)
        cache, mixed = attend(
            cache,
            ref,
            _SCAN,
            selective_scan,
            inner,
            jax.nn.softplus(step + self.step_bias[...]),
            -jnp.exp(matrix_of(self.log_decay[...])),
            self.b_norm(b),
            self.c_norm(c),
            self.skip[...],
            axes=(1, 1, 0, None, None, 0),
            out_axis=1,
        )
        return self.out(mixed * jax.nn.silu(gate), live), cache

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.in_proj`` and so on."""
        channels, embed = self.sizes.channels(self.shards), self.sizes.embed
        in_turn, grown = convert.split_in_turn(2, channels), convert.pad_axis(0, channels)
        select = convert.linear(channels, self.select.weight.shape[-1])
        step, out = convert.linear(self.sizes.rank, channels), convert.linear(channels, embed)
        yield from self.project.weights((*path, "project"), (f"{name}.in_proj",), layer, in_turn, in_turn)
        yield from self.conv.weights((*path, "conv"), f"{name}.conv1d", layer, grown)
        yield from self.select.weights((*path, "select"), (f"{name}.x_proj",), layer, select, may_quantise=False)
        for attribute, norm in (("step_norm", "dt"), ("b_norm", "b"), ("c_norm", "c")):
            yield from getattr(self, attribute).weights((*path, attribute), f"{name}.{norm}_layernorm", layer)
        yield from self.step.weights((*path, "step"), (f"{name}.dt_proj",), layer, step, may_quantise=False)
        by_channel = P(TENSOR_AXIS)
        yield WeightSource((*path, "step_bias"), (f"{name}.dt_proj.bias",), grown, by_channel, layer)
        yield WeightSource((*path, "log_decay"), (f"{name}.A_log",), grown, P(TENSOR_AXIS, None), layer)
        yield WeightSource((*path, "skip"), (f"{name}.D",), grown, by_channel, layer)
        yield from self.out.weights((*path, "out"), (f"{name}.out_proj",), layer, out)
