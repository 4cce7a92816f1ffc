"""Turns matrices that a CPU holds in bfloat16 as they are, or in panels of float32, into arrays, as which they compute
the same.

An engine holds them so until somebody wants its weights as arrays, or gives it others that are arrays or that bfloat16
would round.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.panelled_floats import PanelledFloats
from pallas_kernels.tiled_floats import TiledFloats


def num_exact(params: Any) -> int:
    """Return how many matrices of some weights, or of their shapes, are held so."""
    return sum(map(_is_exact, _leaves(params)))


def widened_shapes(described: Any) -> Any:
    """Return shapes, dtypes and shardings of weights as `widened` would return these."""

    def shape(leaf: Any) -> Any:
        if not _is_exact(leaf):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=jax.tree.leaves(leaf)[0].sharding)

    return jax.tree.map(shape, described, is_leaf=_is_exact)


def widened(params: Any) -> Any:
    """Return weights with those matrices as arrays of float32; all other arrays are the same."""
    return jax.tree.map(lambda leaf: _wide(leaf) if _is_exact(leaf) else leaf, params, is_leaf=_is_exact)


@jax.jit
def _wide(matrix: TiledFloats | PanelledFloats) -> jax.Array:
    return matrix.dequantised(jnp.dtype(jnp.float32))


def _is_exact(leaf: Any) -> bool:
    return isinstance(leaf, PanelledFloats) or (isinstance(leaf, TiledFloats) and leaf.exact)


def _leaves(params: Any) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=_is_exact)
