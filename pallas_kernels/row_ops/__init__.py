"""Computes the operations between products, row by row: norms, sums before them, gates, maxima of logits.

XLA fuses these into few operations on accelerators. On a CPU it makes several passes, mostly on one core, with a
slow exponential; `cpu` makes one pass of each on all cores. `tpu` makes one launch of a norm and the addition before
it, where XLA makes three operations. Rows do not meet.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.platform import Impl
from pallas_kernels.row_ops import cpu, tpu
from pallas_kernels.stacked_row import StackedRow, vector_of

__all__ = ["add_rms_norm", "gated", "largest", "rms_norm"]


def rms_norm(
    x: Float[Array, "*batch size"],
    scale: Float[Array, " size"] | StackedRow | None,
    eps: float,
    *,
    offset: float = 0.0,
    impl: Impl = "xla",
) -> Float[Array, "*batch size"]:
    """Return ``x / sqrt(mean(x^2) + eps) * (offset + scale)`` over the last axis, computed in float32.

    Args:
        scale: None = 1, without `offset`.
        impl: ``cpu`` needs compiled loops and an unsharded operand, and leaves what is not float32, or has no scale,
            to XLA. ``tpu`` needs an unsharded operand, and leaves what `tpu.takes` does not name, or has no scale, to
            XLA.
    """
    if impl in ("tpu", "tpu_interpret") and scale is not None and tpu.takes(x):
        return tpu.rms_norm(x, scale, eps, offset, interpret=impl == "tpu_interpret")
    if impl == "cpu" and scale is not None and cpu.takes(x):
        return cpu.rms_norm(x, vector_of(scale), eps, offset)
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    if scale is not None:
        wide = wide * (offset + vector_of(scale).astype(jnp.float32))
    return wide.astype(x.dtype)


def add_rms_norm(
    x: Float[Array, "*batch size"],
    more: Float[Array, "*batch size"],
    scale: Float[Array, " size"] | StackedRow | None,
    eps: float,
    *,
    offset: float = 0.0,
    impl: Impl = "xla",
) -> tuple[Float[Array, "*batch size"], Float[Array, "*batch size"]]:
    """Return ``x + more`` and its `rms_norm`.

    Args:
        impl: ``tpu`` needs unsharded operands, and leaves what `tpu.takes` does not name, or has no scale, to XLA. For
            ``cpu`` see `rms_norm`.
    """
    if impl in ("tpu", "tpu_interpret") and scale is not None and tpu.takes(x, more):
        return tpu.add_rms_norm(x, more, scale, eps, offset, interpret=impl == "tpu_interpret")
    if impl == "cpu" and scale is not None and cpu.takes(x) and cpu.takes(more):
        return cpu.add_rms_norm(x, more, vector_of(scale), eps, offset)
    total = x + more
    return total, rms_norm(total, scale, eps, offset=offset)


def gated(
    both: Float[Array, "rows gate_and_up"], activation: str, *, impl: Impl = "xla"
) -> Float[Array, "rows width"] | None:
    """Return ``act(gate) * up`` of rows whose first half is the gate, or None where `impl` does not compute it.

    Args:
        activation: Hugging Face's name of a function; those of `cpu.ACTIVATIONS` are computed here.
        impl: ``cpu`` needs compiled loops and an unsharded operand of float32.
    """
    if impl == "cpu" and cpu.takes(both) and activation in cpu.ACTIVATIONS:
        return cpu.gated(both, activation)
    return None


def largest(x: Float[Array, "rows size"], *, impl: Impl = "xla") -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Return the first place of each row's largest number, and the logarithm of the sum of its numbers' exponentials.

    Args:
        impl: ``cpu`` needs compiled loops and an unsharded operand, and leaves what is not float32 to XLA.
    """
    if impl == "cpu" and cpu.takes(x):
        return cpu.largest(x)
    # Two plain reductions: XLA:CPU runs a variadic one several times slower.
    places = jnp.arange(x.shape[1], dtype=jnp.int32)
    top = x.max(axis=1, keepdims=True)
    return jnp.where(x == top, places, x.shape[1] - 1).min(axis=1), jax.nn.logsumexp(x, axis=1)
