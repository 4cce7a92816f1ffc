"""Whether one tree of weights can stand for another."""

from __future__ import annotations

from typing import Any

import jax


def check_like(new: Any, old: Any) -> None:
    """Both trees have the same structure, shapes and dtypes.

    Raises:
        ValueError: naming the first leaf that differs.
    """
    old_leaves, new_leaves = _leaves(old), _leaves(new)
    for path, its_old in old_leaves.items():
        leaf = new_leaves.get(path)
        if leaf is None:
            raise ValueError(f"params{path} of the engine is missing")
        if its_old.shape != leaf.shape or its_old.dtype != leaf.dtype:
            raise ValueError(
                f"params{path} is {leaf.dtype}{list(leaf.shape)}, the engine's is {its_old.dtype}{list(its_old.shape)}"
            )
    for path in new_leaves.keys() - old_leaves.keys():
        raise ValueError(f"the engine has no params{path}")
    old_def: Any = jax.tree.structure(old)  # mypy finds no comparison in what jax calls a PyTreeDef
    if jax.tree.structure(new) != old_def:
        raise ValueError(
            f"params are a {type(new).__name__} of other containers than the {type(old).__name__} of the engine"
        )


def _leaves(tree: Any) -> dict[str, Any]:
    """By path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
