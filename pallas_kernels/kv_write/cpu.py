"""Implements kv_write on CPUs: rows are copied to their slots by a loop that Numba compiles, several at a time.

XLA:CPU scatters number by number, on one core, and has no scatter of bfloat16: it converts the whole pool to float32
and back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_codes import has_scales, stored

DTYPES = ("float32", "bfloat16", "uint16")
"""Views that K and V of float32 are written to; uint16 holds bfloat16, see `pallas_kernels.kv_codes`."""


def write_rows(
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    rows: Float[Array, "tokens kv_heads tiles 128"],
    slots: Int[Array, " tokens"],
) -> Float[Array, "blocks layers kv_heads tiles block_size 128"]:
    """See `pallas_kernels.kv_write.write_rows`; the view has no scales."""
    from pallas_kernels.kv_write.cpu_kernel import target  # needs Numba

    like = jax.ShapeDtypeStruct(view.shape, view.dtype)
    call = jax.ffi.ffi_call(target(view.dtype.itemsize), like, input_output_aliases={0: 0})
    return call(view, stored(rows, view.dtype), jnp.asarray(layer, jnp.int32)[None], slots.astype(jnp.int32))


def kv_write(
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int[Array, " tokens"],
) -> Float[Array, "blocks layers kv_heads tiles block_size 128"]:
    """See `pallas_kernels.kv_write.kv_write`; the view has one of `DTYPES`. K and V are rounded as they are written."""
    from pallas_kernels.kv_write.cpu_kernel import kv_target

    like = jax.ShapeDtypeStruct(view.shape, view.dtype)
    call = jax.ffi.ffi_call(kv_target(view.dtype.name), like, input_output_aliases={0: 0})
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    return call(view, k, v, jnp.asarray(layer, jnp.int32)[None], slots.astype(jnp.int32))


def takes_kv(view: jax.Array) -> bool:
    """Tell whether `kv_write` writes a view, whose rows then need not be put together before."""
    return view.dtype.name in DTYPES


def takes(view: jax.Array) -> bool:
    """Tell whether a view is written here; rows of codes with scales are not."""
    return not has_scales(view.dtype)
