"""Whether one tree of weights can stand for another."""

from __future__ import annotations

from typing import Any

import jax


def check_like(new: Any, old: Any) -> None:
    """Both trees have the same structure, shapes and dtypes.

    Raises:
        ValueError: naming the first leaf that differs.
    """
    old_def: Any  # mypy finds no comparison in what jax calls a PyTreeDef
    old_leaves, old_def = jax.tree_util.tree_flatten_with_path(old)
    new_leaves, new_def = jax.tree_util.tree_flatten_with_path(new)
    if old_def != new_def:
        raise ValueError(f"params have another structure: {new_def} in place of {old_def}")
    for (path, old), (_, leaf) in zip(old_leaves, new_leaves, strict=True):
        if old.shape != leaf.shape or old.dtype != leaf.dtype:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)}, "
                f"the engine's is {old.dtype}{list(old.shape)}"
            )
