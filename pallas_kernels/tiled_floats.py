"""Holds a float matrix in bfloat16, in tiles as a CPU's instructions for pairs of them read it: 16 outputs by 2 inputs.

An instruction multiplies two neighbouring inputs of each of 16 outputs with two numbers of a row and adds both products
to the output's sum. A panel of 16 outputs is one run of memory. Numbers are held as the integers of their bits: XLA:CPU
turns whole arrays of bfloat16 into float32 for operations that it has no instructions for.

A matrix whose numbers are bfloat16 already loses nothing: with ``product="float32"`` its products are those of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.held_matrix import HeldMatrix
from pallas_kernels.tile_order import OUTPUTS, columns_at_once, fill_tiles

INPUTS = 2
"""Inputs of a tile."""
WHOLE_ROWS = 32
"""Divisor of the numbers of a rounded row, the last ones 0: what any kind of instructions reads at once."""
Product: TypeAlias = Literal["bfloat16", "float32"]
"""Names the factors of a product: "bfloat16" rounds the numbers of its rows; "float32" takes them as they are."""


class NotBfloat16Error(ValueError):
    """Numbers that must not be rounded are not bfloat16."""


@partial(jax.tree_util.register_dataclass, data_fields=("bits",), meta_fields=("axis", "inputs", "outputs", "product"))
@dataclass(frozen=True)
class TiledFloats(HeldMatrix):
    """Stands where a float matrix [inputs, outputs], or a table [outputs, inputs], would; `tiled_floats` makes it.

    Attributes:
        bits: uint16 [panels, pairs, 16, 2], or of a stack of matrices one more axis before; tiles have zeros beyond the
            matrix.
        axis: the contracted one, negative: -2 of a matrix, -1 of a table.
        inputs, outputs: of the matrix.
        product: whether products round their rows to bfloat16, or take them in float32.
    """

    bits: Any
    axis: int = field(default=-2)
    inputs: int = field(default=0)
    outputs: int = field(default=0)
    product: Product = field(default="bfloat16")

    @property
    def ndim(self) -> int:
        return self.bits.ndim - 2

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the matrix that this stands for."""
        own = (self.inputs, self.outputs) if self.axis == -2 else (self.outputs, self.inputs)
        return (*self.bits.shape[:-4], *own)

    @property
    def T(self) -> TiledFloats:
        """Return the transposed matrix, which has the same tiles."""
        return TiledFloats(self.bits, -3 - self.axis, self.inputs, self.outputs, self.product)

    def read_rows(self, ids: Int[Array, " ids"], dtype: jnp.dtype) -> Float[Array, "ids inputs"]:
        """Return the rows of a table that have these ids; ids out of range read some row."""
        ids = jnp.clip(ids, 0, self.outputs - 1)
        rows = self.bits[ids // OUTPUTS, :, ids % OUTPUTS].reshape(len(ids), -1)[:, : self.inputs]
        return _wide(rows).astype(dtype)

    def untiled(self) -> Float[Array, "*matrix"]:
        """Return the matrix in bfloat16."""
        return jax.lax.bitcast_convert_type(self._bits_in_order(), jnp.bfloat16)

    def dequantised(self, dtype: jnp.dtype) -> Float[Array, "*matrix"]:
        """Return the matrix in another dtype."""
        return _wide(self._bits_in_order()).astype(dtype)

    @property
    def is_compact(self) -> bool:  # type: ignore[override]
        return self.product == "float32"

    def as_saved(self, dtype: jnp.dtype) -> Float[Array, "*matrix"]:
        """Return the array: in `dtype` where nothing was rounded, else in bfloat16, which it was rounded to."""
        return self.dequantised(dtype) if self.is_compact else self.untiled()

    def _bits_in_order(self) -> UInt16[Array, "*matrix"]:
        panels, pairs = self.bits.shape[-4:-2]
        by_outputs = jnp.swapaxes(self.bits, -3, -2).reshape(*self.bits.shape[:-4], panels * OUTPUTS, pairs * INPUTS)
        found = by_outputs[..., : self.outputs, : self.inputs]
        return jnp.swapaxes(found, -2, -1) if self.axis == -2 else found


def tiled_floats(
    matrix: Any, axis: int, *, product: Product = "bfloat16", empty: Callable[..., np.ndarray] = np.empty
) -> TiledFloats:
    """Return a matrix of floats in tiles of bfloat16.

    Args:
        matrix: [..., inputs, outputs], or with axis -1 [..., outputs, inputs], of NumPy or read where it is sliced.
        axis: the contracted one.
        product: "bfloat16" rounds the numbers to nearest; "float32" needs numbers that are bfloat16 already.
        empty: makes the tiles' memory from a shape and a dtype.

    Raises:
        NotBfloat16Error: ``product="float32"``, and a number would be rounded.
        ValueError: ``product="float32"``, and the matrix has no such product, see `has_float32_product`.
    """
    if product == "float32" and not has_float32_product(matrix.shape, axis):
        sizes = list(matrix.shape)
        raise ValueError(f'product="float32" needs an even number of inputs, not a matrix {sizes} of axis {axis}')
    whole = abstract(matrix.shape, axis, product=product)
    bits = empty(whole.bits.shape, np.dtype(np.uint16))
    lead = len(matrix.shape) - 2
    for place in np.ndindex(matrix.shape[:lead]):
        at = tuple(slice(index, index + 1) for index in place)
        for start, stop in columns_at_once(whole.inputs, whole.outputs):
            part = slice(start, stop)
            own = np.asarray(matrix[(*at, slice(None), part) if axis == -2 else (*at, part, slice(None))])
            own = own.reshape(own.shape[lead:])
            given = (_bits if product == "bfloat16" else _unrounded_bits)(own.T if axis == -2 else own)
            fill_tiles(bits[(*place, slice(start // OUTPUTS, -(-stop // OUTPUTS)))], given)
    return TiledFloats(bits, axis, whole.inputs, whole.outputs, product)


def abstract(shape: tuple[int, ...], axis: int, *, product: Product = "bfloat16") -> TiledFloats:
    """Return the result of `tiled_floats` for a matrix of this shape, with shapes for arrays."""
    inputs, outputs = shape[-2:] if axis == -2 else shape[-2:][::-1]
    tiles = (-(-outputs // OUTPUTS), -(-inputs // INPUTS), OUTPUTS, INPUTS)
    return TiledFloats(jax.ShapeDtypeStruct((*shape[:-2], *tiles), np.uint16), axis, inputs, outputs, product)


def has_float32_product(shape: tuple[int, ...], axis: int) -> bool:
    """Tell whether a matrix of this shape has float32 products: its inputs are whole pairs, so that no product reads
    beyond a row."""
    return shape[axis] % INPUTS == 0


def has_bits_of_matmul(shape: tuple[int, ...], axis: int) -> bool:
    """Tell whether float32 products with such a matrix have the bits of `pallas_kernels.matmul` with an array.

    The loops there leave to XLA what is no whole number of panels wide, and some products with tables.
    """
    return axis == -2 and shape[-1] % OUTPUTS == 0


def rounded_numbers(inputs: int) -> int:
    """Return how many numbers a rounded row takes: a multiple of `WHOLE_ROWS`."""
    return -(-inputs // WHOLE_ROWS) * WHOLE_ROWS


def _bits(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(ml_dtypes.bfloat16, copy=False).view(np.uint16)


def _unrounded_bits(numbers: np.ndarray) -> np.ndarray:
    """Return the upper halves of float32 numbers whose lower halves are 0."""
    if numbers.dtype == ml_dtypes.bfloat16:
        return numbers.view(np.uint16)
    wide = numbers.astype(np.float32, copy=False).view(np.uint32)
    if np.bitwise_or.reduce(wide, axis=None) & 0xFFFF:
        raise NotBfloat16Error("numbers are not in bfloat16 as they are: holding them so would round them")
    return (wide >> 16).astype(np.uint16)


def _wide(bits: UInt16[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
