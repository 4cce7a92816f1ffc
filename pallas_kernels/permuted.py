"""Holds a matrix whose inputs lie in another order than what multiplies it, as GPTQ's act-order does.

GPTQ quantises the inputs with the largest activations first, so neighbours of a group are spread over the whole axis.
Sorted by group at loading, the codes lie in ordinary groups, which every product understands; a product permutes its
rows instead. That moves one row of activations, not the matrix. XLA gathers rows that are split over devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.held_matrix import HeldMatrix


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
