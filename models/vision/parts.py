"""Runs a tower in parts: what is in front of its layers, some rounds of these, and what comes after them.

A tower is written as one call, whose `LayerStack` runs something else here. Each part is read off that call: the state
that the layers are given or leave, or the features that the tower makes of it. The compiler drops what no result reads.
`LayerStack.instead` stays set, as each part is traced with a tower made for it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from jpaged.model_api import Attend, AttendWithinSegments

from ..stack import LayerStack, StackState


def stack_of(tower: nnx.Module) -> LayerStack | None:
    """Return a tower's layers; None where they are in several stacks, or in none."""
    found = [module for _, module in nnx.iter_graph(tower) if isinstance(module, LayerStack)]
    return found[0] if len(found) == 1 else None


def rounds_of(tower: nnx.Module) -> tuple[int, ...]:
    """Return the layers of each round of a tower, see `LayerStack.rounds`; () = it is run as a whole."""
    stack = stack_of(tower)
    return () if stack is None else stack.rounds


def entering(tower: Any, row: Mapping[str, Array], attend: AttendWithinSegments) -> StackState:
    """Return what is in front of a tower's first layer."""
    return _called(tower, row, attend, lambda stack, hidden, *_: stack.begun(hidden))[0]


def through(
    tower: Any,
    row: Mapping[str, Array],
    attend: AttendWithinSegments,
    state: StackState,
    first: Int[Array, ""],
    stop: Int[Array, ""],
) -> StackState:
    """Return the state after rounds [`first`, `stop`) of a tower's layers."""

    def some(stack: LayerStack, _: Array, shared: Any, cache: Any, attend: Attend) -> StackState:
        return stack.run_rounds(state, shared, cache, attend, first, stop)[0]

    return _called(tower, row, attend, some)[0]


def leaving(
    tower: Any, row: Mapping[str, Array], attend: AttendWithinSegments, state: StackState
) -> Float[Array, "features embeds"]:
    """Return the features of the state after a tower's last layer."""
    return _called(tower, row, attend, lambda *_: state)[1]


def _called(
    tower: Any,
    row: Mapping[str, Array],
    attend: AttendWithinSegments,
    layers: Callable[..., StackState],
) -> tuple[StackState, Float[Array, "features embeds"]]:
    """Return the state that `layers` leaves in the place of a tower's layers, and the features of that state.

    Args:
        layers: takes the stack and what the tower calls it with.

    Raises:
        ValueError: the tower calls its layers more than once, or never.
    """
    left: list[StackState] = []

    def instead(stack: LayerStack, hidden: Array, shared: Any, cache: Any, attend: Attend) -> tuple[Any, ...]:
        left.append(layers(stack, hidden, shared, cache, attend))
        hidden, *within = stack.ended(left[0])
        return hidden, cache, *within

    stack = stack_of(tower)
    assert stack is not None, "a tower that has no rounds is run as a whole"
    stack.instead = instead
    features = tower(row, attend)
    if len(left) != 1:
        raise ValueError(
            f"{type(tower).__name__} calls its LayerStack {len(left)} times: a tower that is run in parts calls it once"
        )
    return left[0], features
