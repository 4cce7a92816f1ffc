"""Tells whether one tree of weights can stand for another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.held_matrix import HeldMatrix, is_held


def plain_dict(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Turn a state into dictionaries of its variables' values, which a program takes apart faster.

    Unlike `nnx.to_pure_dict` it leaves no reference cycle that would keep the values alive.
    """
    return {key: plain_dict(value) if isinstance(value, Mapping) else _value(value) for key, value in state.items()}


def _value(variable: Any) -> Any:
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable


def check_like(new: Any, old: Any) -> None:
    """Check that both trees have the same structure, shapes and dtypes.

    Raises:
        ValueError: they differ; names the first leaf that does.
    """
    old_leaves, new_leaves = _leaves(old), _leaves(new)
    for path, old_leaf in old_leaves.items():
        leaf = new_leaves.get(path)
        if leaf is None:
            raise ValueError(f"new{path} is missing, which the engine's params have")
        if old_leaf.shape != leaf.shape or old_leaf.dtype != leaf.dtype:
            cast = "; cast=True converts it" if old_leaf.shape == leaf.shape and _are_floats(leaf, old_leaf) else ""
            expected = f"{old_leaf.dtype}{list(old_leaf.shape)}"
            raise ValueError(f"new{path} is {leaf.dtype}{list(leaf.shape)}, the engine's is {expected}{cast}")
    for path in new_leaves.keys() - old_leaves.keys():
        raise ValueError(f"new{path} is none of the engine's params")
    old_def: Any = jax.tree.structure(old)  # mypy finds no comparison in what jax calls a PyTreeDef
    if jax.tree.structure(new) != old_def:
        raise ValueError(
            f"new is a {type(new).__name__} of other containers than the {type(old).__name__} of the engine's params"
        )


def _are_floats(*leaves: Any) -> bool:
    return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)


def _leaves(tree: Any) -> dict[str, Any]:
    """Return a tree's leaves by path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def num_compact(params: Any) -> int:
    """Return how many matrices are compact, see `HeldMatrix.is_compact`; `params` are weights or their shapes."""
    return sum(map(_is_compact, _matrices(params)))


def float32_shapes(described: Any) -> Any:
    """Return shapes, dtypes and shardings of weights as `to_float32` would return these."""

    def shape(leaf: Any) -> Any:
        if not _is_compact(leaf):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=jax.tree.leaves(leaf)[0].sharding)

    return jax.tree.map(shape, described, is_leaf=_is_compact)


def to_float32(params: Any) -> Any:
    """Return weights with compact matrices as arrays of float32; all other arrays are the same."""
    return jax.tree.map(lambda leaf: _wide(leaf) if _is_compact(leaf) else leaf, params, is_leaf=_is_compact)


@jax.jit
def _wide(matrix: HeldMatrix) -> jax.Array:
    return matrix.dequantised(jnp.dtype(jnp.float32))


def _is_compact(leaf: Any) -> bool:
    return is_held(leaf) and leaf.is_compact


def _matrices(params: Any) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=_is_compact)
