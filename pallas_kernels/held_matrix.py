"""Defines the interface of matrices that are held otherwise than as one array.

`pallas_kernels.products` maps each class of these to the functions that multiply with it. Everything else, such as
saving, planning and hashing, goes through the properties here, so a new class needs no `isinstance` elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self, TypeGuard

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
