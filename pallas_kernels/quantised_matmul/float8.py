"""Multiplies with float8 codes in float8 (w8a8), for devices whose matrix units do so twice as fast as in bfloat16."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.quantised import QuantisedMatrix


def multiply_as_float8(
    x: Float[Array, "rows inputs"], matrix: QuantisedMatrix, out_dtype: jnp.dtype
) -> Float[Array, "rows outputs"]:
    """Return the product of rows that are rounded to float8_e4m3fn, each with a separate scale.

    Args:
        matrix: has float8_e4m3fn codes and one scale per output. XLA may partition it.
    """
    wide = x.astype(jnp.float32)
    steps = jnp.abs(wide).max(axis=1, keepdims=True) / float(jnp.finfo(jnp.float8_e4m3fn).max)
    rounded = (wide / jnp.where(steps == 0, 1, steps)).astype(jnp.float8_e4m3fn)
    product = jnp.dot(rounded, matrix.codes, preferred_element_type=jnp.float32)
    return (product * steps * matrix.scales[0].astype(jnp.float32)).astype(out_dtype)
