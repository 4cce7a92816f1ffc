"""Holds matrices as codes with scales (weight-only quantisation); `pallas_kernels.products` multiplies with them.

Each value is ``code * scale``, or ``code * scale + minimum``. A group of neighbours along the contracted axis shares
one scale and one minimum; a group may be the whole axis.

A `Codec` says how codes lie in memory and what number each stands for: it is the jnp half of a held format.
`pallas_kernels.quantised_matmul.gpu_kernel` decodes the codecs of `TRITON_CODECS` in registers, and
`pallas_kernels.tiled` lays those of `DECODED_CODECS` out for a CPU's loops, whose integer instructions multiply those
of `INTEGER_CODECS`. A codec in none of these sets is decoded by XLA, everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.held_matrix import HeldMatrix


def _as_numbers(codes: Num[Array, "*codes"]) -> Float[Array, "*codes"]:
    return codes.astype(jnp.float32)


E2M1_VALUES = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32
)
"""The value of each e2m1 code (OCP Microscaling Formats 1.0, 2023, section 5.3.3)."""


def _e2m1(codes: Int[Array, "*codes"]) -> Float[Array, "*codes"]:
    """Return `E2M1_VALUES` of codes, computed, as accelerators look slowly at tables."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent, 1) - 1)
    return jnp.where(codes > 7, -0.5, 0.5) * doubled.astype(jnp.float32)


def _e8m0(bits: Int[Array, "*scales"]) -> Float[Array, "*scales"]:
    """Return ``2 ** (bits - 127)``; 255 means no number."""
    wide = bits.astype(jnp.uint32)
    pattern = jnp.where(wide == 0, jnp.uint32(0x00400000), wide << 23)  # 2 ** -127 is subnormal
    pattern = jnp.where(wide == 255, jnp.uint32(0x7FC00000), pattern)
    return jax.lax.bitcast_convert_type(pattern, jnp.float32)


def _from_table(table: np.ndarray, codes: Int[Array, "*codes"]) -> Float[Array, "*codes"]:
    return jnp.take(jnp.asarray(table, jnp.float32), codes.astype(jnp.int32), mode="clip")


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

E2M1_FLOATS = Codec("e2m1 pairs with float scales", np.dtype(np.uint8), paired=True, values=_e2m1)
"""The codes of `E2M1_PAIRS` whose scales are floats (NVFP4)."""
NF4_VALUES = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
"""Quantiles of the normal distribution, of which the largest is 1 (NormalFloat; Dettmers et al., 2023, appendix E)."""
_FP4_HALF = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
FP4_VALUES = np.concatenate([_FP4_HALF, -_FP4_HALF])
"""bitsandbytes' floats of 4 bits, of which the largest is 1."""
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""The numbers of GGUF's IQ4_NL and IQ4_XS (``kvalues_iq4nl`` in llama.cpp, ggml-common.h)."""
NF4_PAIRS, FP4_PAIRS, IQ4_PAIRS = (
    Codec(f"{name} pairs", np.dtype(np.uint8), paired=True, values=partial(_from_table, table))
    for name, table in (("nf4", NF4_VALUES), ("fp4", FP4_VALUES), ("iq4", IQ4_VALUES))
)
"""Two places in a table a byte."""

TRITON_CODECS = frozenset({INT8, FLOAT8, UINT4_PAIRS, E2M1_PAIRS})
INTEGER_CODECS = frozenset({INT8, UINT4_PAIRS})
"""Codecs whose tiles a CPU's integer instructions multiply (`pallas_kernels.tiled_matmul.cpu_kernel`)."""
DECODED_CODECS = INTEGER_CODECS | {FLOAT8, E2M1_PAIRS, E2M1_FLOATS, NF4_PAIRS, FP4_PAIRS, IQ4_PAIRS}
"""Codecs that a CPU's loops decode to float32 (`pallas_kernels.tiled_matmul.cpu_exact`)."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "minimums"),
    meta_fields=("axis", "codec", "rounds_rows"),
)
@dataclass(frozen=True)
class QuantisedMatrix(HeldMatrix):
    """Takes the place of a float matrix ``[..., inputs, outputs]`` or a table ``[vocab, embed]``.

    Attributes:
        codes: an array of the matrix' shape, of ``codec.dtype``; half as long along `axis` when two share a byte.
        scales: an array of the matrix' shape, but with one entry a group along `axis`.
        minimums: has the shape of `scales`; None where values are ``code * scale``.
        axis: the contracted one, negative: -2 of a matrix, -1 of a table.
        codec: what the codes stand for.
        rounds_rows: whether a product may round what the matrix multiplies to 8 bits, as a CPU's tiles, a TPU's
            integers and a GPU's float8 do. False: rows are multiplied in their own dtype on every platform.
    """

    codes: Any
    scales: Any
    minimums: Any = None
    axis: int = field(default=-2)
    codec: Codec = field(default=INT8)
    rounds_rows: bool = field(default=True)

    has_codes = True

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.codes.shape)
        shape[self.axis] *= 2 if self.codec.paired else 1
        return tuple(shape)

    @property
    def T(self) -> QuantisedMatrix:
        """Return the transposed matrix. There must be no leading dimensions."""
        minimums = None if self.minimums is None else self.minimums.T
        return QuantisedMatrix(self.codes.T, self.scales.T, minimums, -3 - self.axis, self.codec, self.rounds_rows)

    def rows(self, ids: Int[Array, " ids"]) -> QuantisedMatrix:
        """Return the rows of a table with these ids, still as codes. An id out of range reads an arbitrary row."""
        return jax.tree.map(lambda part: jnp.take(part, ids, axis=0, mode="clip"), self)

    def read_rows(self, ids: Int[Array, " ids"], dtype: jnp.dtype) -> Float[Array, "ids embed"]:
        return self.rows(ids).dequantised(dtype)

    def dequantised(self, dtype: jnp.dtype) -> Float[Array, "*matrix"]:
        """Return the matrix, computed in float32 and rounded to `dtype`."""
        axis = self.ndim + self.axis
        groups = self.scales.shape[axis]
        shape = self.codes.shape
        codes = self.codes.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
        if self.codec.paired:
            codes = jnp.concatenate([codes & 15, codes >> 4], axis=axis + 1)
        values = self.codec.values(codes) * self.codec.factors(jnp.expand_dims(self.scales, axis + 1))
        if self.minimums is not None:
            values = values + jnp.expand_dims(self.minimums, axis + 1).astype(jnp.float32)
        return values.astype(dtype).reshape(self.shape)

    @property
    def scales_follow(self) -> bool:
        """Tell whether an output has one scale, which can multiply the product in place of the codes."""
        return self.scales.shape[self.axis] == 1 and self.minimums is None and not self.codec.paired

    def as_saved(self, dtype: jnp.dtype) -> QuantisedMatrix:
        return self

    def parts(self) -> Mapping[str, Any]:
        parts = {"codes": self.codes, "scales": self.scales, "minimums": self.minimums}
        return {name: part for name, part in parts.items() if part is not None}
