"""Implements rotated_heads for float32 on CPUs, by the loops of `cpu_kernel`, which XLA calls on its own threads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.custom_calls import target
from pallas_kernels.rotated_heads.reference import HeadNorms


def rotated_heads(
    joined: Float[Array, "tokens kv_heads rows head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    norms: HeadNorms | None = None,
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.rotated_heads.rotated_heads`."""

    tokens, kv_heads, rows, width = joined.shape
    one = jax.ShapeDtypeStruct((tokens, kv_heads, width), joined.dtype)
    queries = jax.ShapeDtypeStruct((tokens, kv_heads, rows - 2, width), joined.dtype)
    operands = [joined, cos.astype(jnp.float32), sin.astype(jnp.float32)]
    if norms is not None:
        operands += [norms.factors, jnp.asarray([norms.eps], jnp.float32)]
    name = target(f"rotated_heads.cpu_kernel:{'target' if norms is None else 'normed_target'}")
    call = jax.ffi.ffi_call(name, (queries, one, one))
    q, k, v = call(*operands)
    return q, k, v
