"""Rolls a loop over layers whose weights stay separate arrays.

XLA:CPU copies a layer's weights out of a stack before it multiplies with them (measured on SmolLM2-135M, one token:
31 ms a step against 14 ms), and unrolling the layers compiles the attention loops once a layer (6 to 10 s a shape
against 2 to 3 s). `PerLayerWeights` does both: the loop's body is compiled once, and a product picks its weights by
branching on the layer's number, each branch a product that reads its own weights in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.held_matrix import HeldMatrix, is_held
from pallas_kernels.low_rank import AdaptedMatrix
from pallas_kernels.matmul import chosen_product


@jax.tree_util.register_pytree_node_class
class PerLayerWeights:
    """Holds the same matrix of several layers, and says which layer's is meant.

    It stands where a matrix would in a layer's parameters; products understand it (`multiply`), and what else needs a
    matrix reads it (`matrix_of`).
    """

    def __init__(self, matrices: Sequence[Array | HeldMatrix], index: int | Int[Array, ""]):
        self.matrices: tuple[Any, ...] = tuple(matrices)
        self.index = index

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return (self.matrices, self.index), None

    @classmethod
    def tree_unflatten(cls, _: None, parts: tuple[Any, ...]) -> PerLayerWeights:
        weights = object.__new__(cls)
        weights.matrices, weights.index = parts
        return weights

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one matrix."""
        return self.matrices[0].shape

    def __getitem__(self, key: Any) -> PerLayerWeights:
        if key is not Ellipsis:
            raise TypeError(f"weights of several layers cannot be indexed with {key!r}: only products understand it")
        return self

    def read(self) -> Array:
        """Return a copy of the chosen matrix: for small ones that something else than a product needs."""
        return jax.lax.switch(self.index, [lambda matrix=matrix: matrix for matrix in self.matrices])

    def multiply(self, product: Callable[[Array, Any], Array], x: Array) -> Array:
        """Return ``product(x, matrix)`` with the chosen matrix."""
        return chosen_product(product, x, self.matrices, self.index)


_WHOLE = (HeldMatrix, AdaptedMatrix)
"""Classes of matrices that are made of several arrays."""


def matrix_of(parameter: Array | PerLayerWeights) -> Array:
    """Return a parameter's matrix, copied where it is one of a `PerLayerWeights`."""
    return parameter.read() if isinstance(parameter, PerLayerWeights) else parameter


def choose(layers: Sequence[Any], index: int | Int[Array, ""]) -> Any:
    """Pick one layer's parameters out of all layers' trees: `PerLayerWeights` for matrices; vectors, which are
    small, are gathered."""

    def pick(*leaves: Any) -> PerLayerWeights | Array | AdaptedMatrix:
        if isinstance(leaves[0], AdaptedMatrix):  # the layers' adapters lie in one array
            bank = PerLayerWeights([leaf.weight for leaf in leaves], index)
            return leaves[0].of_layer(bank, jnp.asarray([leaf.at for leaf in leaves])[index])
        if is_held(leaves[0]) or leaves[0].ndim >= 2:
            return PerLayerWeights(leaves, index)
        return jnp.stack(leaves)[index]

    return jax.tree.map(pick, *layers, is_leaf=lambda leaf: isinstance(leaf, _WHOLE))
