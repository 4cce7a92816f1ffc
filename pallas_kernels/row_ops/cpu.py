"""Implements row_ops for float32 on CPUs, by loops that Numba compiles and XLA calls on its own threads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.custom_calls import target

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Maps the name of a gate's activation to the loop that computes it."""


def takes(x: jax.Array) -> bool:
    """Tell whether rows are computed here: float32 ones."""
    return x.dtype == jnp.float32 and x.ndim > 1


def rms_norm(
    x: Float[Array, "*batch size"], scale: Float[Array, " size"], eps: float, offset: float
) -> Float[Array, "*batch size"]:
    """See `pallas_kernels.row_ops.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1])
    like = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    call = jax.ffi.ffi_call(target("row_ops.cpu_kernel:norm_target"), like)
    return call(rows, scale.astype(jnp.float32), _settings(eps, offset)).reshape(x.shape)


def add_rms_norm(
    x: Float[Array, "*batch size"],
    more: Float[Array, "*batch size"],
    scale: Float[Array, " size"],
    eps: float,
    offset: float,
) -> tuple[Float[Array, "*batch size"], Float[Array, "*batch size"]]:
    """See `pallas_kernels.row_ops.add_rms_norm`."""
    rows = x.reshape(-1, x.shape[-1])
    like = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    name = target("row_ops.cpu_kernel:add_norm_target")
    call = jax.ffi.ffi_call(name, (like, like), input_output_aliases={0: 0})
    total, normed = call(rows, more.reshape(rows.shape), scale.astype(jnp.float32), _settings(eps, offset))
    return total.reshape(x.shape), normed.reshape(x.shape)


def gated(both: Float[Array, "rows gate_and_up"], activation: str) -> Float[Array, "rows width"]:
    """See `pallas_kernels.row_ops.gated`."""
    like = jax.ShapeDtypeStruct((both.shape[0], both.shape[1] // 2), both.dtype)
    return jax.ffi.ffi_call(target("row_ops.cpu_kernel:gate_target", ACTIVATIONS[activation]), like)(both)


def largest(x: Float[Array, "rows size"]) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """See `pallas_kernels.row_ops.largest`."""
    rows = (len(x),)
    like = jax.ShapeDtypeStruct(rows, jnp.int32), jax.ShapeDtypeStruct(rows, x.dtype)
    places, totals = jax.ffi.ffi_call(target("row_ops.cpu_kernel:totals_target"), like)(x)
    return places, totals


def _settings(eps: float, offset: float) -> Float[Array, " 2"]:
    return jnp.asarray([eps, offset], jnp.float32)
