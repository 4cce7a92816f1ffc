"""The mixer of Mamba-2 (Dao & Gu, 2024): heads with one decay each, and B and C that the heads of a group share.

Groups with their heads are split over the tensor shards. One sum crosses them, after the projection out; where there
are fewer groups than shards, another of one number a token and slot, for the norm of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import TENSOR_AXIS, BuildContext, LayerRef, Recur, StatePart, WeightSource
from pallas_kernels.recurrent import ssd

from .. import weights as convert
from ..linear import Linear
from ..parameters import constant_param, wide_param
from ..stack import Shared
from .convolution import CausalConv, conv_state
from .slots import Slots, columns, rows

_SCAN = "scan"

HYBRID_FIELDS: Mapping[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, float("inf")),
}
"""Fields of the configs of models that attend too, such as Bamba, and their defaults."""


def follow_head_dim(fields: dict[str, Any], inner: int) -> None:
    """Set the heads' width in the fields of a hybrid's config.

    Args:
        inner: width of all heads together.

    Raises:
        ValueError: the heads do not make it up.
    """
    heads = fields["mamba_n_heads"]
    if fields["mamba_d_head"] == "auto":
        fields["mamba_d_head"] = inner // heads
    if fields["mamba_d_head"] * heads != inner:
        raise ValueError(f"mamba_d_head={fields['mamba_d_head']} * mamba_n_heads={heads} is not {inner}")


@dataclass(frozen=True)
class Mamba2Sizes:
    """Describes a mixer.

    Attributes:
        embed: width of the residual stream.
        head_dim: channels of a head.
        state: numbers that each channel keeps.
        conv_width: inputs of the convolution.
        conv_bias, proj_bias: whether the convolution, and the projections in and out, have biases.
        eps: of the norm.
        step_limits: least and most step size.
        slots: the heads, and the groups that share B and C.
        norm: "gated" normalises what the gate has multiplied; "then gate" multiplies by the gate after the norm; None
            has the gate only.
        scales: factors of what is projected: z, x, B, C and the step sizes. None = none.
    """

    embed: int
    head_dim: int
    state: int
    conv_width: int
    conv_bias: bool
    proj_bias: bool
    eps: float
    step_limits: tuple[float, float]
    slots: Slots
    norm: Literal["gated", "then gate"] | None = "gated"
    scales: tuple[float, float, float, float, float] | None = None

    @classmethod
    def of_hybrid(cls, config: Any, build: BuildContext, **more: Any) -> Mamba2Sizes:
        """Read the fields that hybrids name alike, see `HYBRID_FIELDS`.

        Args:
            more: further attributes.

        Raises:
            ValueError: the heads do not divide over the groups.
        """
        said = "mamba_n_heads and mamba_n_groups"
        return cls(
            embed=config.hidden_size,
            head_dim=config.mamba_d_head,
            state=config.mamba_d_state,
            conv_width=config.mamba_d_conv,
            conv_bias=config.mamba_conv_bias,
            proj_bias=config.mamba_proj_bias,
            eps=config.rms_norm_eps,
            step_limits=tuple(config.time_step_limit),
            slots=Slots.of(config.mamba_n_heads, config.mamba_n_groups, build.tensor_parallel, said),
            **more,
        )

    @property
    def conv_channels(self) -> int:
        """Return the channels that are convolved in one slot: its heads', B and C."""
        return self.slots.share * self.head_dim + 2 * self.state

    def state_parts(self, build: BuildContext) -> tuple[StatePart, ...]:
        """Return the parts of the state that a layer keeps of a sequence."""
        heads = StatePart(_SCAN, (self.slots.placed_heads, self.head_dim, self.state))
        return conv_state(self.slots.number * self.conv_channels, self.conv_width, build), heads


def _gated(
    y: Float[Array, "tokens channels"], gate: Float[Array, "tokens channels"]
) -> Float[Array, "tokens channels"]:
    return y * jax.nn.silu(gate.astype(jnp.float32))


class GatedGroupNorm(nnx.Module):
    """``norm(y * silu(gate))``, or ``norm(y) * silu(gate)``, an RMSNorm over the channels of each group; computed in
    float32.

    Parameters: scale [heads * head_dim], as the slots place them.
    """

    def __init__(self, sizes: Mamba2Sizes, build: BuildContext):
        slots = sizes.slots
        self.scale = constant_param(build, (slots.placed_heads * sizes.head_dim,), 1.0)
        self.sizes = sizes

    def __call__(
        self, y: Float[Array, "tokens channels"], gate: Float[Array, "tokens channels"]
    ) -> Float[Array, "tokens channels"]:
        slots = self.sizes.slots
        gated_first, wide = self.sizes.norm == "gated", y.astype(jnp.float32)
        if gated_first:
            wide = _gated(wide, gate)
        by_slot = wide.reshape(len(y), slots.number, -1)
        squares = jnp.square(by_slot).sum(axis=-1)
        group = np.asarray(slots.layout.kv_of_slot)
        if len(set(group)) < len(group):  # several slots of a group, maybe on several devices
            # No product: XLA:CPU gets that of so small matrices wrong where it fuses it (jax 0.10).
            squares = jnp.where(group[:, None] == group, squares[:, None], 0.0).sum(axis=-1)
        mean = squares / (slots.heads // slots.shared * self.sizes.head_dim)
        normed = (by_slot * jax.lax.rsqrt(mean + self.sizes.eps)[..., None]).reshape(y.shape)
        if gated_first:
            return self.scale[...] * normed.astype(y.dtype)
        return _gated(self.scale[...].astype(jnp.float32) * normed, gate).astype(y.dtype)

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the source of ``{name}.weight``."""
        by_slot = rows(self.sizes.slots.of_heads(self.sizes.head_dim))
        yield WeightSource((*path, "scale"), (f"{name}.weight",), by_slot, P(TENSOR_AXIS), layer)


class Mamba2(nnx.Module):
    """``out(norm(ssd(silu(conv(x, B, C))) * silu(z)))``, x, B, C, z and the step sizes being projections of the token.
    `Mamba2Sizes.norm` may leave the norm out, or the gate to what comes after it.

    Parameters: project [embed, slots * (conv_channels + heads * head_dim + heads)], slot by slot x, B and C, z, and the
    heads' step sizes; step_bias, log_decay and skip [heads] in float32; norm; out [heads * head_dim, embed]. Heads
    beyond the checkpoint's have weights of zero.
    """

    def __init__(self, sizes: Mamba2Sizes, build: BuildContext):
        slots = sizes.slots
        inner, heads = slots.placed_heads * sizes.head_dim, slots.placed_heads
        convolved = slots.number * sizes.conv_channels
        by_column, by_row = P(None, TENSOR_AXIS), P(TENSOR_AXIS, None)
        wide = convolved + inner + heads
        self.project = Linear(sizes.embed, wide, build, partition=by_column, bias=sizes.proj_bias)
        self.conv = CausalConv(convolved, sizes.conv_width, build, bias=sizes.conv_bias, activation="silu")
        self.step_bias, self.log_decay, self.skip = (
            wide_param((heads,)),
            wide_param((heads,)),
            wide_param((heads,), 1.0),
        )
        self.norm = None if sizes.norm is None else GatedGroupNorm(sizes, build)
        self.out = Linear(inner, sizes.embed, build, partition=by_row, bias=sizes.proj_bias)
        self.sizes = sizes

    def __call__(
        self, x: Float[Array, "tokens embed"], shared: Shared, cache: Any, ref: LayerRef, attend: Recur
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        sizes, slots, tokens = self.sizes, self.sizes.slots, len(x)
        width = slots.share * sizes.head_dim
        fused = jax.lax.optimization_barrier(self.project(x, shared.live_rows)).reshape(tokens, slots.number, -1)
        if sizes.scales is not None:
            z, *convolved, steps = sizes.scales
            parts = (*convolved, z, steps), (width, sizes.state, sizes.state, width, slots.share)
            fused = fused * jnp.asarray(np.repeat(*parts), fused.dtype)
        mixed, gate, step = jnp.split(fused, (sizes.conv_channels, sizes.conv_channels + width), axis=-1)
        mixed, cache = self.conv(mixed.reshape(tokens, -1), cache, ref, attend)
        inner, b, c = jnp.split(mixed.reshape(tokens, slots.number, -1), (width, width + sizes.state), axis=-1)
        step = jax.nn.softplus(step.reshape(tokens, -1).astype(jnp.float32) + self.step_bias[...])
        cache, y = attend(
            cache,
            ref,
            _SCAN,
            ssd,
            inner.reshape(tokens, slots.placed_heads, sizes.head_dim),
            jnp.clip(step, *sizes.step_limits),
            -jnp.exp(self.log_decay[...]),
            b,
            c,
            self.skip[...],
            axes=(1, 1, 0, 1, 1, 0),
            out_axis=1,
        )
        y, gate = y.reshape(tokens, -1), gate.reshape(tokens, -1)
        y = _gated(y.astype(jnp.float32), gate).astype(y.dtype) if self.norm is None else self.norm(y, gate)
        return self.out(y, shared.live_rows), cache

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.in_proj`` and so on."""
        sizes, slots = self.sizes, self.sizes.slots
        inner, shared = slots.heads * sizes.head_dim, slots.shared * sizes.state

        def convolved(start: int):
            """Return where x, B and C lie, one after another from row `start` on."""
            x, b = slots.of_heads(sizes.head_dim, start), slots.of_shared(sizes.state, start + inner)
            return x, b, slots.of_shared(sizes.state, start + inner + shared)

        step = slots.of_heads(1, 2 * inner + 2 * shared)
        fuse = columns(*convolved(inner), slots.of_heads(sizes.head_dim), step)
        out = convert.split_out(slots.layout, slots.heads, sizes.head_dim)
        yield from self.project.weights((*path, "project"), (f"{name}.in_proj",), layer, fuse, fuse)
        yield from self.conv.weights((*path, "conv"), f"{name}.conv1d", layer, rows(*convolved(0)))
        for attribute, tensor in (("step_bias", "dt_bias"), ("log_decay", "A_log"), ("skip", "D")):
            placed = convert.place_heads(slots.layout)
            yield WeightSource((*path, attribute), (f"{name}.{tensor}",), placed, P(TENSOR_AXIS), layer)
        if self.norm is not None:
            yield from self.norm.weights((*path, "norm"), f"{name}.norm", layer)
        yield from self.out.weights((*path, "out"), (f"{name}.out_proj",), layer, out, unit=sizes.head_dim)
