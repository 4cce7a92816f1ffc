"""The mixer of Gated DeltaNet (Yang et al., 2024), as Qwen3-Next and Qwen3.5 have it.

Key heads, with the value heads that use them, are split over the tensor shards, and stand on several where there are
fewer than shards. One sum crosses them, after the projection out.
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
from pallas_kernels.recurrent import gated_delta

from .. import weights as convert
from ..layers import RMSNorm
from ..linear import Linear
from ..parameters import wide_param
from ..stack import Shared
from .convolution import CausalConv, conv_state
from .slots import Rows, Slots, columns, rows

_DELTA = "delta"
_NORM_EPS = 1e-6
"""Added to the squared length of a query or key before its root is taken; no config names it."""


@dataclass(frozen=True)
class DeltaSizes:
    """Describes a mixer.

    Attributes:
        embed: width of the residual stream.
        key_dim, value_dim: widths of a head's key and value.
        conv_width: inputs of the convolution.
        eps: of the norm.
        slots: the value heads, and the key heads that they share.
        fused: the checkpoint has two projections, key head by key head (Qwen3-Next), not four, part by part (Qwen3.5).
    """

    embed: int
    key_dim: int
    value_dim: int
    conv_width: int
    eps: float
    slots: Slots
    fused: bool

    @property
    def conv_channels(self) -> int:
        """Return the channels that are convolved in one slot: its query, its key and its heads' values."""
        return 2 * self.key_dim + self.slots.share * self.value_dim

    def state_parts(self, build: BuildContext) -> tuple[StatePart, ...]:
        """Return the parts of the state that a layer keeps of a sequence."""
        heads = StatePart(_DELTA, (self.slots.placed_heads, self.key_dim, self.value_dim))
        return conv_state(self.slots.number * self.conv_channels, self.conv_width, build), heads

    def convolved(self) -> tuple[Rows, ...]:
        """Return where queries, keys and values lie, part by part."""
        slots, keys = self.slots, self.slots.shared * self.key_dim
        values = slots.of_heads(self.value_dim, 2 * keys)
        return slots.of_shared(self.key_dim), slots.of_shared(self.key_dim, keys), values

    def projections(self) -> tuple[tuple[str, ...], tuple[Rows, ...]]:
        """Return the checkpoint's projections, and where in them lie query, key, values, gates, rates and decays."""
        slots, k, v = self.slots, self.key_dim, self.value_dim
        if not self.fused:
            apart = slots.of_heads(v, tensor=1), slots.of_heads(1, tensor=2), slots.of_heads(1, tensor=3)
            return ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), (*self.convolved(), *apart)
        each = slots.heads // slots.shared
        stride = 2 * k + 2 * each * v
        return ("in_proj_qkvz", "in_proj_ba"), (
            slots.of_shared_by_shared(k, 0, stride),
            slots.of_shared_by_shared(k, k, stride),
            slots.of_heads_by_shared(v, 2 * k, stride),
            slots.of_heads_by_shared(v, 2 * k + each * v, stride),
            slots.of_heads_by_shared(1, 0, 2 * each, tensor=1),
            slots.of_heads_by_shared(1, each, 2 * each, tensor=1),
        )


class GatedDeltaNet(nnx.Module):
    """``out(norm(delta(silu(conv(q, k, v)))) * silu(z))``, q, k, v, z, rates and decays being projections of the token.

    Parameters: project [embed, slots * (conv_channels + heads * (value_dim + 2))], slot by slot query, key and values,
    gates z, rates and decays; step_bias and log_decay [heads] in float32; norm over value_dim; out [heads * value_dim,
    embed]. Heads beyond the checkpoint's have weights of zero.
    """

    def __init__(self, sizes: DeltaSizes, build: BuildContext):
        slots = sizes.slots
        inner, heads = slots.placed_heads * sizes.value_dim, slots.placed_heads
        convolved = slots.number * sizes.conv_channels
        by_column, by_row = P(None, TENSOR_AXIS), P(TENSOR_AXIS, None)
        self.project = Linear(sizes.embed, convolved + inner + 2 * heads, build, partition=by_column)
        self.conv = CausalConv(convolved, sizes.conv_width, build, bias=False, activation="silu")
        self.step_bias, self.log_decay = wide_param((heads,)), wide_param((heads,))
        self.norm = RMSNorm(sizes.value_dim, sizes.eps, build)
        self.out = Linear(inner, sizes.embed, build, partition=by_row)
        self.sizes = sizes

    def __call__(
        self, x: Float[Array, "tokens embed"], shared: Shared, cache: Any, ref: LayerRef, attend: Recur
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        sizes, slots, tokens = self.sizes, self.sizes.slots, len(x)
        keys, values = sizes.key_dim, slots.share * sizes.value_dim
        fused = jax.lax.optimization_barrier(self.project(x, shared.live_rows)).reshape(tokens, slots.number, -1)
        convolved = sizes.conv_channels
        borders = (convolved, convolved + values, convolved + values + slots.share)
        mixed, gate, rate, step = jnp.split(fused, borders, axis=-1)
        mixed, cache = self.conv(mixed.reshape(tokens, -1), cache, ref, attend)
        q, k, v = jnp.split(mixed.reshape(tokens, slots.number, -1), (keys, 2 * keys), axis=-1)
        by_head = (tokens, slots.placed_heads, sizes.value_dim)
        rate, step = (part.reshape(tokens, -1).astype(jnp.float32) for part in (rate, step))
        cache, out = attend(
            cache,
            ref,
            _DELTA,
            gated_delta,
            jnp.repeat(_unit(q) * keys**-0.5, slots.share, axis=1),
            jnp.repeat(_unit(k), slots.share, axis=1),
            v.reshape(by_head),
            -jnp.exp(self.log_decay[...]) * jax.nn.softplus(step + self.step_bias[...]),
            jax.nn.sigmoid(rate),
            axes=(1, 1, 1, 1, 1),
            out_axis=1,
        )
        gated = self.norm(out).astype(jnp.float32) * jax.nn.silu(gate.reshape(by_head).astype(jnp.float32))
        return self.out(gated.astype(x.dtype).reshape(tokens, -1), shared.live_rows), cache

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.in_proj_qkvz`` and so on."""
        sizes, slots = self.sizes, self.sizes.slots
        tensors, parts = sizes.projections()
        out = convert.split_out(slots.layout, slots.heads, sizes.value_dim)
        projections = [f"{name}.{tensor}" for tensor in tensors]
        yield from self.project.weights((*path, "project"), projections, layer, columns(*parts))
        yield from self.conv.weights((*path, "conv"), f"{name}.conv1d", layer, rows(*sizes.convolved()))
        for attribute, tensor in (("step_bias", "dt_bias"), ("log_decay", "A_log")):
            placed = convert.place_heads(slots.layout)
            yield WeightSource((*path, attribute), (f"{name}.{tensor}",), placed, P(TENSOR_AXIS), layer)
        yield from self.norm.weights((*path, "norm"), f"{name}.norm", layer)
        yield from self.out.weights((*path, "out"), (f"{name}.out_proj",), layer, out, unit=sizes.value_dim)


def _unit(x: Float[Array, "tokens heads dim"]) -> Float[Array, "tokens heads dim"]:
    """Return vectors of length one, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.square(wide).sum(axis=-1, keepdims=True) + _NORM_EPS)
