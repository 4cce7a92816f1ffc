"""Implements rotated_heads for float32 on CPUs, by a loop that Numba compiles and XLA calls on its own threads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rotated_heads(
    joined: Float[Array, "tokens kv_heads rows head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.rotated_heads.rotated_heads`."""
    from pallas_kernels.rotated_heads.cpu_kernel import target  # needs Numba

    tokens, kv_heads, rows, width = joined.shape
    one = jax.ShapeDtypeStruct((tokens, kv_heads, width), joined.dtype)
    queries = jax.ShapeDtypeStruct((tokens, kv_heads, rows - 2, width), joined.dtype)
    call = jax.ffi.ffi_call(target(), (queries, one, one))
    q, k, v = call(joined, cos.astype(jnp.float32), sin.astype(jnp.float32))
    return q, k, v
