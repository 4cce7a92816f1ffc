"""How far apart checkpoints of recurrent layers lie inside a prompt, by what a state takes beside attention's KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jpaged.memory.layout import GroupSpec
from jpaged.memory.policies import StateCheckpoints, VerifiedStates

MOST_OF_KV = 1.5
"""Bytes of a checkpoint over those of the KV of the tokens up to the next one, where that is not `MOST_INTERVALS`."""

MOST_INTERVALS = 4
"""Intervals that lie between two checkpoints at most: a hit inside a prompt loses up to so many tokens."""


def spread_checkpoints(groups: Sequence[GroupSpec]) -> list[GroupSpec]:
    """Return the layer groups with checkpoints further apart inside prompts where a state is large.

    A state of Bamba-9B takes what its attention keeps for 10,000 tokens: with a checkpoint every 512 tokens a long
    prompt would fill a pool with states that hardly anybody begins with, and so push out those that are.
    """
    kept = sum(spec.real_bytes / spec.block_size for spec in groups if _keeps_tokens(spec))
    taken = sum(spec.real_bytes for spec in groups if isinstance(spec.policy, StateCheckpoints))
    return [
        replace(spec, policy=replace(spec.policy, spacing=spec.policy.interval * _intervals(spec.policy, taken, kept)))
        if isinstance(spec.policy, StateCheckpoints)
        else spec
        for spec in groups
    ]


def _intervals(policy: StateCheckpoints, taken: float, kept: float) -> int:
    """Return how many intervals lie between two checkpoints of `taken` bytes beside `kept` bytes of KV a token."""
    wanted = taken / (MOST_OF_KV * policy.interval * kept) if kept else MOST_INTERVALS
    return round(min(MOST_INTERVALS, max(1.0, wanted)))


def _keeps_tokens(spec: GroupSpec) -> bool:
    """Tell whether a group keeps something for each token of text."""
    return spec.policy.names_tokens and not isinstance(spec.policy, StateCheckpoints | VerifiedStates)
