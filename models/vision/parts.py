"""Runs a tower in parts: what is in front of its layers, some rounds of these, and what comes after them.

A tower is written as one call. Here its `LayerStack` hands back control where the tower calls it, so that each part
traces only what it needs; the compiler drops what no result reads. `LayerStack.instead` stays set, as each part is
traced with a tower made for it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from jpaged.model_api import Attend, AttendWithinSegments

from ..stack import LayerStack, StackState


class _AtLayersError(Exception):
    """Leaves a tower where it calls its layers.

    Attributes:
        state: what is in front of the next layer.
    """

    def __init__(self, state: StackState) -> None:
        super().__init__()
        self.state = state


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
    return _at_layers(tower, row, attend, lambda stack, hidden, *_: stack.begun(hidden))


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

    return _at_layers(tower, row, attend, some)


def leaving(
    tower: Any, row: Mapping[str, Array], attend: AttendWithinSegments, state: StackState
) -> Float[Array, "features embeds"]:
    """Return the features of the state after a tower's last layer."""

    def ended(stack: LayerStack, _: Array, shared: Any, cache: Any, *rest: Any) -> tuple[Any, ...]:
        hidden, *within = stack.ended(state)
        return hidden, cache, *within

    stack = stack_of(tower)
    assert stack is not None
    stack.instead = ended
    features: Float[Array, "features embeds"] = tower(row, attend)
    return features


def _at_layers(
    tower: Any,
    row: Mapping[str, Array],
    attend: AttendWithinSegments,
    run: Callable[..., StackState],
) -> StackState:
    """Return what `run` makes of a tower's layers and of what they are called with."""

    def stopped(*call: Any) -> tuple[Any, ...]:
        raise _AtLayersError(run(*call))

    stack = stack_of(tower)
    assert stack is not None
    stack.instead = stopped
    try:
        tower(row, attend)
    except _AtLayersError as found:
        return found.state
    raise AssertionError("a tower does not call its layers")
