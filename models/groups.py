"""Which layer keeps which KV memory, read from a config: full attention or a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jpaged.model_api import LayerGroup

from .stack import LayerKind

_GROUP_OF_TYPE = {"full_attention": "full", "sliding_attention": "window"}


def type_of_group(group: str) -> str:
    """The layer type, as configs name it, of a group's layers."""
    return next(layer_type for layer_type, name in _GROUP_OF_TYPE.items() if name == group)


def kinds_from_types(config: Any) -> tuple[LayerKind, ...]:
    """One kind a layer from ``config.layer_types``.

    Raises:
        ValueError: for an unknown layer type, or a wrong number of them.
    """
    for layer_type in config.layer_types:
        if layer_type not in _GROUP_OF_TYPE:
            raise ValueError(f"layer_types names {layer_type!r}; known: {', '.join(_GROUP_OF_TYPE)}")
    if len(config.layer_types) != config.num_hidden_layers:
        raise ValueError(f"layer_types has {len(config.layer_types)} entries for {config.num_hidden_layers} layers")
    return tuple(LayerKind(_GROUP_OF_TYPE[t]) for t in config.layer_types)


def layer_groups(
    kinds: Sequence[LayerKind], kv_heads: int, head_dim: int, sliding_window: int | None
) -> tuple[LayerGroup, ...]:
    """The groups "window" and "full", those that have layers.

    Raises:
        ValueError: when layers slide but `sliding_window` is not a positive number of tokens.
    """
    groups = []
    for name, window in (("window", sliding_window), ("full", None)):
        layers = tuple(i for i, kind in enumerate(kinds) if kind.group == name)
        if not layers:
            continue
        if name == "window" and (window is None or window < 1):
            raise ValueError(f"sliding_window={window} must be a positive number of tokens: some layers slide")
        groups.append(LayerGroup(name, layers, kv_heads, head_dim, window))
    return tuple(groups)
