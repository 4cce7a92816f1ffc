"""Reads from a config which layer keeps which memory: full attention, a sliding window, chunks, or a state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jpaged.model_api import AttentionGroup, LayerGroup, StateGroup, StatePart

from .stack import LayerKind

_GROUP_OF_TYPE = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "state",
    "conv": "state",
}


def type_of_group(group: str) -> str:
    """Return the layer type, as configs name it, of a group's layers."""
    return next(layer_type for layer_type, name in _GROUP_OF_TYPE.items() if name == group)


def kinds_from_types(config: Any, local: str = "sliding_attention") -> tuple[LayerKind, ...]:
    """Return one kind a layer from ``config.layer_types``, which may name full attention and the family's `local` type.

    Raises:
        ValueError: for an unknown layer type, or a wrong number of them.
    """
    known = ("full_attention", local)
    for layer_type in config.layer_types:
        if layer_type not in known:
            raise ValueError(f"layer_types names {layer_type!r}; known: {', '.join(known)}")
    if len(config.layer_types) != config.num_hidden_layers:
        raise ValueError(f"layer_types has {len(config.layer_types)} entries for {config.num_hidden_layers} layers")
    return tuple(LayerKind(_GROUP_OF_TYPE[t]) for t in config.layer_types)


def share_kv(kinds: Sequence[LayerKind], factor: int | None) -> tuple[LayerKind, ...]:
    """Share KV: the first of every `factor` layers of each group keeps KV, and the others of them read it.

    Cross-layer attention (Brandon et al., 2024); interleaved with windows, as character.ai serves its models.

    Raises:
        ValueError: when `factor` is not positive, or None as in a config without the field.
    """
    if factor is None:
        raise ValueError("use_cla is set, but cla_share_factor is missing: the number of layers that share KV")
    if factor < 1:
        raise ValueError(f"cla_share_factor={factor} must be at least 1 layer")
    seen: Counter[str | None] = Counter()
    shared = []
    for kind in kinds:
        shared.append(replace(kind, shares_kv=seen[kind.group] % factor > 0))
        seen[kind.group] += 1
    return tuple(shared)


class KVSize(NamedTuple):
    """Says how large the KV of a layer is, see `jpaged.model_api.AttentionGroup`."""

    kv_heads: int
    head_dim: int
    q_per_kv: int | None


def layer_groups(
    kinds: Sequence[LayerKind],
    kv_heads: int,
    head_dim: int,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    *,
    q_per_kv: int | None = None,
) -> tuple[LayerGroup, ...]:
    """Return the groups of layers whose KV has one size, see `sized_groups`."""
    size = KVSize(kv_heads, head_dim, q_per_kv)
    return sized_groups(kinds, lambda _: size, sliding_window, attention_chunk_size)


def sized_groups(
    kinds: Sequence[LayerKind],
    size_of: Callable[[str], KVSize],
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
) -> tuple[LayerGroup, ...]:
    """Return the groups "window", "chunk" and "full", as far as they have layers, with the layers that keep KV.

    Args:
        size_of: returns the size of a group's KV, by its name; asked only for groups that have layers.

    Raises:
        ValueError: when layers slide but `sliding_window` is not a positive number of tokens; chunks likewise.
    """

    def checked(field: str, tokens: int | None) -> int:
        if tokens is None or tokens < 1:
            raise ValueError(f"{field}={tokens} must be a positive number of tokens: some layers are local")
        return tokens

    limits: dict[str, Callable[[], dict[str, Any]]] = {
        "window": lambda: {"sliding_window": checked("sliding_window", sliding_window)},
        "chunk": lambda: {"chunk_size": checked("attention_chunk_size", attention_chunk_size)},
        "full": dict,
    }
    groups = []
    for name, limit in limits.items():
        keepers = tuple(i for i, kind in enumerate(kinds) if kind.group == name and not kind.shares_kv)
        readers = sum(kind.group == name and kind.shares_kv for kind in kinds)
        if keepers:
            size = size_of(name)
            groups.append(
                AttentionGroup(
                    name, keepers, size.kv_heads, size.head_dim, **limit(), readers=readers, q_per_kv=size.q_per_kv
                )
            )
    return tuple(groups)


def state_groups(kinds: Sequence[LayerKind], parts: Sequence[StatePart]) -> tuple[LayerGroup, ...]:
    """Return the group "state" of the recurrent layers, each of which keeps `parts`; none where there are no such
    layers."""
    layers = tuple(number for number, kind in enumerate(kinds) if kind.group == "state")
    return (StateGroup("state", layers, tuple(parts)),) if layers else ()
