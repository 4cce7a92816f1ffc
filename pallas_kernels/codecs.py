"""Defines the codes that quantised matrices hold: how they lie in memory and what number each stands for.

A `Codec` is the jnp half of a held format; `pallas_kernels.quantised_matmul.gpu_kernel` decodes the codecs of
`TRITON_CODECS` in registers, and `pallas_kernels.tiled` lays those of `TILED_CODECS` out for a CPU's integer
instructions. A codec in neither set is decoded by XLA, everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int, Num


def _as_numbers(codes: Num[Array, "*codes"]) -> Float[Array, "*codes"]:
    return codes.astype(jnp.float32)


def _e2m1(codes: Int[Array, "*codes"]) -> Float[Array, "*codes"]:
    """Return the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 of 4-bit codes; the highest bit is the sign."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent, 1) - 1)
    return jnp.where(codes > 7, -0.5, 0.5) * doubled.astype(jnp.float32)


def _e8m0(bits: Int[Array, "*scales"]) -> Float[Array, "*scales"]:
    """Return ``2 ** (bits - 127)``; 255 means no number."""
    wide = bits.astype(jnp.uint32)
    pattern = jnp.where(wide == 0, jnp.uint32(0x00400000), wide << 23)  # 2 ** -127 is subnormal
    pattern = jnp.where(wide == 255, jnp.uint32(0x7FC00000), pattern)
    return jax.lax.bitcast_convert_type(pattern, jnp.float32)


@dataclass(frozen=True)
class Codec:
    """Describes one kind of codes. Two codecs are equal if their names are.

    Attributes:
        name: identifies the codec in messages and in the hash of a compiled program.
        dtype: of the array that holds the codes.
        paired: whether a byte holds two 4-bit codes: a group's first half lies in the low nibbles and its second half
            in the high ones, as in GGUF's blocks, so that unpacking needs no interleaving.
        values: codes, one an element -> float32 numbers.
        factors: scales as they are held -> float32 numbers.
    """

    name: str
    dtype: np.dtype = field(compare=False, repr=False)
    paired: bool = field(default=False, compare=False, repr=False)
    values: Callable[[Array], Array] = field(default=_as_numbers, compare=False, repr=False)
    factors: Callable[[Array], Array] = field(default=_as_numbers, compare=False, repr=False)


INT8 = Codec("int8", np.dtype(np.int8))
FLOAT8 = Codec("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn))
UINT4 = Codec("uint4", np.dtype(ml_dtypes.uint4))
"""4-bit numbers 0 to 15 in a dtype that a TPU's memory packs by itself."""
UINT4_PAIRS = Codec("uint4 pairs", np.dtype(np.uint8), paired=True)
"""Two 4-bit numbers 0 to 15 a byte; a group has a minimum."""
E2M1_PAIRS = Codec("e2m1 pairs", np.dtype(np.uint8), paired=True, values=_e2m1, factors=_e8m0)
"""Two floats of a sign, two bits of exponent and one of mantissa a byte. Scales are uint8: exponents of two, plus 127
(MXFP4; OCP Microscaling Formats 1.0, 2023)."""

TRITON_CODECS = frozenset({INT8, FLOAT8, UINT4_PAIRS, E2M1_PAIRS})
TILED_CODECS = frozenset({INT8, UINT4_PAIRS})
