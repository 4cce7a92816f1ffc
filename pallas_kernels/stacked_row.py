"""Names a layer's vector by the array that holds all layers' and the layer's number.

In a loop over stacked layers XLA takes a vector out of its stack before a kernel is called with it, and such an
operation costs a TPU about two thousand cycles. A kernel that is given the stack and the number reads the vector as
it reads all its operands, while these are fetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@partial(jax.tree_util.register_dataclass, data_fields=("stack", "number"), meta_fields=())
@dataclass(frozen=True)
class StackedRow:
    """Stands where a vector would in a layer's parameters; kernels that take one say so, others need `vector_of`.

    Attributes:
        stack: the vectors of all layers. The middle dimension lets a TPU fetch one without the registers' other rows.
        number: of the layer's vector.
    """

    stack: Float[Array, "layers 1 size"]
    number: Int[Array, ""]

    def __getitem__(self, key: EllipsisType) -> StackedRow:
        if key is not Ellipsis:
            raise TypeError(f"a stacked row cannot be indexed with {key!r}: read it by vector_of")
        return self

    def read(self) -> Float[Array, " size"]:
        """Return a copy of the vector."""
        return jax.lax.dynamic_index_in_dim(self.stack, self.number, keepdims=False)[0]


def vector_of(vector: Array | StackedRow) -> Float[Array, " size"]:
    """Return a vector, which is copied where it is one of a stack."""
    return vector.read() if isinstance(vector, StackedRow) else vector


def stacked(vector: Array | StackedRow) -> StackedRow:
    """Return a vector as one of a stack, which has no others where it is none of any."""
    return vector if isinstance(vector, StackedRow) else StackedRow(vector[None, None], jnp.int32(0))


@partial(jax.tree_util.register_dataclass, data_fields=("stack", "number"), meta_fields=())
@dataclass(frozen=True)
class StackedTable:
    """Stands where the matrices of a layer's experts would; `pallas_kernels.expert_mlps` takes one, others `read` it.

    Attributes:
        stack: the tables of all layers, [layers, experts, inputs, outputs], as an array or held otherwise, or their
            biases, [layers, experts, outputs].
        number: of the layer's table.
    """

    stack: Any
    number: Int[Array, ""]

    def __getitem__(self, key: EllipsisType) -> StackedTable:
        if key is not Ellipsis:
            raise TypeError(f"a stacked table cannot be indexed with {key!r}: only products of experts understand it")
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the layer's table."""
        return self.stack.shape[1:]

    def read(self) -> Any:
        """Return a copy of the layer's table, in the form of the stack."""
        return jax.tree.map(lambda part: jax.lax.dynamic_index_in_dim(part, self.number, keepdims=False), self.stack)
