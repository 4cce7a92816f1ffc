"""Takes weights as NNX holds them: a module, a state, what `nnx.split` gives, or a state's plain dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx


def state_of(new: Any, old: Any) -> Any:
    """Return NNX's weights as a tree of the structure of `old`, with the same arrays; anything else as it is.

    Variables may be of other classes or carry other metadata than those of `old`: a trainer's do. Arrays stay where
    they are.
    """
    if isinstance(new, tuple) and len(new) == 2 and isinstance(new[0], nnx.GraphDef):
        new = new[1]
    if isinstance(new, nnx.Module):
        new = nnx.state(new, nnx.Param)
    if not isinstance(new, nnx.State) and not _is_nested(new):
        return new
    structure: Any = jax.tree.structure(old)  # mypy finds no comparison in what jax calls a PyTreeDef
    if jax.tree.structure(new) == structure:
        return new
    given, wanted = _by_path(new), _by_path(old)
    if given.keys() != wanted.keys():
        return new  # whoever places it names what is missing
    return _filled(old, given, ())


def _is_nested(new: Any) -> bool:
    return isinstance(new, Mapping) and bool(new) and all(isinstance(value, Mapping) for value in new.values())


def _by_path(tree: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return values by path, each a variable's value."""
    found: dict[tuple[Any, ...], Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _by_path(value, (*path, key))
        else:
            found[*path, key] = value.get_value() if isinstance(value, nnx.Variable) else value
    return found


def _filled(old: Any, given: Mapping[tuple[Any, ...], Any], path: tuple[Any, ...]) -> Any:
    filled = {}
    for key, value in old.items():
        here = (*path, key)
        if isinstance(value, Mapping):
            filled[key] = _filled(value, given, here)
        else:
            filled[key] = value.replace(given[here]) if isinstance(value, nnx.Variable) else given[here]
    return type(old)(filled)
