"""Puts parameters onto their devices one after another, while worker threads read the next few."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jpaged.loading.parameters.exact import Inexact
from jpaged.loading.parameters.host_memory import HostMemory
from jpaged.loading.parameters.placement import Parts, empty_stack, own_parts, place, set_layer
from jpaged.loading.parameters.targets import StatePath, Target, Value, abstract_value
from jpaged.model_api import HostArray
from pallas_kernels.held_matrix import HeldMatrix, is_held
from pallas_kernels.panelled_floats import panelled_floats
from pallas_kernels.quantised import QuantisedMatrix
from pallas_kernels.tiled import tiled
from pallas_kernels.tiled_floats import InexactError, tiled_floats

_READERS = 2
_IN_FLIGHT = 4
"""Most parameters on the host at once, including the one being placed."""

HostValue = HostArray | HeldMatrix
"""A parameter on the host, or a view of it; a quantised one has an array for each part."""
Held = Parts | HeldMatrix
"""This process's parts of a parameter, or of each array of a parameter that is not held as one array."""


def place_all(
    targets: Iterable[Target], read: Callable[[Target], HostValue], mesh: jax.sharding.Mesh
) -> dict[StatePath, Value]:
    """Put a model's parameters on their devices and return them by path; layers are stacked where the targets say so.

    The host holds a few at a time, never the model.

    Args:
        read: returns a target's value; called by worker threads. Its exceptions are raised here.

    Raises:
        Inexact: a target to be held exactly in bfloat16 has values that are not exact in it.
    """
    values: dict[StatePath, Value] = {}
    for target, parts in _read_ahead(targets, read, mesh):
        likes = abstract_value(target, mesh, stacked=False)
        _store(values, target, jax.tree.map(lambda own, like: place(own, like.sharding), parts, likes), mesh)
    return values


def _store(values: dict[StatePath, Value], target: Target, value: Value, mesh: jax.sharding.Mesh) -> None:
    """Store a value in `values`, either whole or as a layer of its stack, in place; the first layer allocates the
    stack."""
    if target.layers is None:
        values[target.path] = value
        return
    if target.path not in values:
        likes = abstract_value(target, mesh)
        values[target.path] = jax.tree.map(lambda like: empty_stack(like.shape, like.dtype, like.sharding), likes)
    values[target.path] = jax.tree.map(
        lambda stack, part: set_layer(stack, part, target.index), values[target.path], value
    )


def _read_ahead(
    targets: Iterable[Target], read: Callable[[Target], HostValue], mesh: jax.sharding.Mesh
) -> Iterator[tuple[Target, Held]]:
    """Yield the targets, in order, each with this process's parts."""
    memory = HostMemory()
    with ThreadPoolExecutor(_READERS, thread_name_prefix="jpaged-weights") as pool:
        waiting: deque[Any] = deque()
        for target in targets:
            waiting.append((target, pool.submit(_own_parts, target, read, mesh, memory)))
            if len(waiting) == _IN_FLIGHT:
                yield _wait(*waiting.popleft())
        while waiting:
            yield _wait(*waiting.popleft())


def _wait(target: Target, future: Future[Held]) -> tuple[Target, Held]:
    """Return a read's target and result.

    It is a separate function so that no frame keeps the future alive: a future holds the array, or an exception whose
    traceback would keep all placed parameters alive.
    """
    try:
        return target, future.result()
    finally:
        del future


def _own_parts(
    target: Target, read: Callable[[Target], HostValue], mesh: jax.sharding.Mesh, memory: HostMemory
) -> Held:
    likes, value = abstract_value(target, mesh, stacked=False), read(target)
    if is_held(value):
        held: Any = value
        if target.tiled:
            assert isinstance(value, QuantisedMatrix)
            held = tiled(value)
    elif target.panelled:
        held = panelled_floats(value)
    elif target.tiled:
        assert target.source.contracted is not None
        try:
            held = tiled_floats(value, target.source.contracted, exact=target.exact)
        except InexactError as error:
            raise Inexact(target) from error
    else:
        held = value
    try:
        return jax.tree.map(lambda array, like: own_parts(array, like.dtype, like.sharding, memory.empty), held, likes)
    except OverflowError as error:
        raise ValueError(f"parameter {target.name}: {error}; use another dtype") from error
