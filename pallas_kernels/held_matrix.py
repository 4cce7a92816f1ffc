"""Defines the interface of matrices that are held otherwise than as one array, and its simplest implementation.

`pallas_kernels.products` maps each class of these to the functions that multiply with it. Everything else, such as
saving, planning and hashing, goes through the properties here, so a new class needs no `isinstance` elsewhere.

`PermutedMatrix` holds a matrix whose inputs lie in another order than what multiplies it, as GPTQ's act-order does.
GPTQ quantises the inputs with the largest activations first, so neighbours of a group are spread over the whole axis.
Sorted by group at loading, the codes lie in ordinary groups, which every product understands; a product permutes its
rows instead. That moves one row of activations, not the matrix. XLA gathers rows that are split over devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class HeldMatrix(ABC):
    """Takes the place of a float matrix in a model's parameters. Only products and `read_rows` read it.

    Attributes:
        has_codes: whether values are codes with scales, so that float weights cannot replace it without quantising.
        is_compact: whether it holds a float32 matrix in another layout or in fewer bytes, without rounding a value:
            products are those of the array, and either can replace the other.
    """

    has_codes: bool = False
    is_compact: bool = False

    @property
    @abstractmethod
    def ndim(self) -> int:
        """Return the number of dimensions of the matrix, stacked axes included."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the matrix."""

    @abstractmethod
    def read_rows(self, ids: Int[Array, " ids"], dtype: jnp.dtype) -> Float[Array, "ids embed"]:
        """Return the rows of a table with these ids. An id out of range reads an arbitrary row."""

    @abstractmethod
    def dequantised(self, dtype: jnp.dtype) -> Float[Array, "*matrix"]:
        """Return the matrix as an array, rounded to `dtype`."""

    def as_saved(self, dtype: jnp.dtype) -> Any:
        """Return the form in which a checkpoint stores the matrix: an array, or a holder with `parts`.

        Layouts of one platform are undone. `dtype` is that of the model's float matrices.
        """
        return self.dequantised(dtype)

    def parts(self) -> Mapping[str, Any]:
        """Return the arrays that a checkpoint stores, by name. Called only on the result of `as_saved`."""
        raise TypeError(f"a {type(self).__name__} is saved as an array, not in parts")

    def __getitem__(self, key: Any) -> Self:
        if key is not Ellipsis:
            raise TypeError(f"a {type(self).__name__} cannot be indexed with {key!r}: only products understand it")
        return self


def is_held(leaf: Any) -> TypeGuard[HeldMatrix]:
    """Tell whether a parameter is a `HeldMatrix`; for ``is_leaf`` of `jax.tree` functions."""
    return isinstance(leaf, HeldMatrix)


@partial(jax.tree_util.register_dataclass, data_fields=("order", "matrix"), meta_fields=())
@dataclass(frozen=True)
class PermutedMatrix(HeldMatrix):
    """Takes the place of a matrix ``[..., inputs, outputs]``; `matrix` holds its inputs in another order.

    Attributes:
        order: int32 [..., inputs]: input n of `matrix` is input ``order[n]`` of the matrix that this stands for.
        matrix: holds the sorted matrix, in any form whose contracted axis is -2.
    """

    order: Any
    matrix: Any

    has_codes = True

    @property
    def ndim(self) -> int:
        return self.matrix.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    def read_rows(self, ids: Int[Array, " ids"], dtype: jnp.dtype) -> Float[Array, "ids embed"]:
        """Raise TypeError: tables are not sorted."""
        raise TypeError("rows of a permuted matrix are not read: tables keep their order")

    def dequantised(self, dtype: jnp.dtype) -> Float[Array, "*matrix"]:
        """Return the matrix with its inputs in their own order."""
        places = jnp.argsort(self.order, axis=-1)
        return jnp.take_along_axis(self.matrix.dequantised(dtype), places[..., None], axis=-2)

    def arranged(self, x: Float[Array, "rows inputs"]) -> Float[Array, "rows inputs"]:
        """Return rows with their inputs in the order of `matrix`. There must be no leading dimensions."""
        return jnp.take(x, self.order, axis=1)

    def as_saved(self, dtype: jnp.dtype) -> PermutedMatrix:
        return PermutedMatrix(self.order, self.matrix.as_saved(dtype))

    def parts(self) -> Mapping[str, Any]:
        return {"order": self.order, **self.matrix.parts()}
