"""Accepts weights in NNX's forms: a module, a state, the result of `nnx.split`, or a state's plain dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx


def state_of(new: Any, old: Any) -> Any:
    """Return NNX's weights as a tree of the structure of `old`, with the same arrays; other mappings unchanged.

    Variables may have other classes or metadata than those of `old`, as a trainer's do. Arrays are not moved.

    Raises:
        ValueError: `new` is neither a form of NNX's weights nor a mapping.
    """
    if isinstance(new, tuple) and len(new) == 2 and isinstance(new[0], nnx.GraphDef):
        new = new[1]
    if isinstance(new, nnx.Module):
        new = nnx.state(new, nnx.Param)
    if not isinstance(new, nnx.State | Mapping):
        raise ValueError(
            f"new weights are of type {type(new).__name__}: give a tree like `params`, a module or state of NNX's, "
            "(graphdef, state) of `nnx.split`, or a mapping of tensors by their names"
        )
    if not isinstance(new, nnx.State) and not _is_nested(new):
        return new
    structure: Any = jax.tree.structure(old)  # mypy finds no comparison in what jax calls a PyTreeDef
    if jax.tree.structure(new) == structure:
        return new
    given, wanted = _by_path(new), _by_path(old)
    if given.keys() != wanted.keys():
        return new  # the error that names missing parameters is raised when it is placed
    return jax.tree.unflatten(structure, [given[path] for path in wanted])


def _is_nested(new: Any) -> bool:
    return isinstance(new, Mapping) and bool(new) and all(isinstance(value, Mapping) for value in new.values())


def _by_path(tree: Any) -> dict[str, Any]:
    """Return leaves by path, in the tree's order; a variable and its value have one path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path).replace(".value", ""): leaf for path, leaf in leaves}
