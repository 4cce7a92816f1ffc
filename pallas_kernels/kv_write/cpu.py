"""Implements kv_write for bfloat16 on CPUs: rows are copied to their slots by a loop of `cpu_kernel`.

XLA:CPU has no scatter of bfloat16: it converts the whole pool to float32 and back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.custom_calls import target


def write_rows(
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    rows: Float[Array, "tokens kv_heads tiles 128"],
    slots: Int[Array, " tokens"],
) -> Float[Array, "blocks layers kv_heads tiles block_size 128"]:
    """See `pallas_kernels.kv_write.write_rows`; the view is bfloat16."""

    like = jax.ShapeDtypeStruct(view.shape, view.dtype)
    call = jax.ffi.ffi_call(target("kv_write.cpu_kernel:target"), like, input_output_aliases={0: 0})
    return call(view, rows.astype(view.dtype), jnp.asarray(layer, jnp.int32)[None], slots.astype(jnp.int32))
