"""Makes one program for all replicas of a data-parallel engine: each computes on its own devices with its own arrays.

On a mesh of ``(data, tensor)`` the arrays of all replicas are stacked along a first axis, which is sharded over `data`;
their pools are one array whose shards are split over both. On a mesh of `tensor` alone there is one replica, and
nothing is stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.model_api import TENSOR_AXIS

DATA_AXIS = "data"
"""Mesh axis over which replicas are spread."""

Kind = Literal["shared", "split", "own"]
"""Relation of an argument or result to replicas: the same for all; cut along its first axis; one for each, stacked."""

T = TypeVar("T")


def num_replicas(mesh: Mesh) -> int:
    """Return how many replicas of the engine the mesh holds."""
    return mesh.shape.get(DATA_AXIS, 1)


def own_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays of which each replica has its own, replicated on its devices."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS) if DATA_AXIS in mesh.shape else PartitionSpec())


def pool_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays with one shard for each device along the first axis."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def stack(mesh: Mesh, each: Sequence[T]) -> T:
    """Stack trees of NumPy arrays, one for each replica, as the programs take them."""
    if DATA_AXIS not in mesh.shape:
        (only,) = each
        return only
    return jax.tree.map(lambda *arrays: np.stack(arrays), *each)


def each_replica(
    function: Callable[..., Any], mesh: Mesh, takes: tuple[Kind, ...], gives: Kind | tuple[Kind, ...]
) -> Callable[..., Any]:
    """Return `function`, written for one replica, as a function of the arrays of all.

    Within it, what is sharded over the tensor axis still is; see `over_tensor`.
    """
    if DATA_AXIS not in mesh.shape:
        return function

    def specs(kinds: Any) -> Any:
        return jax.tree.map(lambda kind: PartitionSpec() if kind == "shared" else PartitionSpec(DATA_AXIS), kinds)

    def on_replica(*args: Any) -> Any:
        results = function(*(_first(arg) if kind == "own" else arg for kind, arg in zip(takes, args, strict=True)))
        if isinstance(gives, str):
            return _stacked(results) if gives == "own" else results
        return tuple(_stacked(x) if kind == "own" else x for kind, x in zip(gives, results, strict=True))

    return jax.shard_map(
        on_replica, mesh=mesh, in_specs=specs(takes), out_specs=specs(gives), axis_names={DATA_AXIS}, check_vma=False
    )


def under_mesh(mesh: Mesh) -> AbstractContextManager[Any]:
    """Return a context in which a `jax.shard_map` that names no mesh is over this one; it may stand within
    `each_replica`."""
    return nullcontext() if DATA_AXIS in mesh.shape else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def over_tensor(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return `function` mapped over a replica's shards by `jax.shard_map`; the call may stand within `each_replica`."""
    # Within another shard_map the mesh is the one it has begun to take apart.
    inner = None if DATA_AXIS in mesh.shape else mesh
    return jax.shard_map(
        function, mesh=inner, in_specs=in_specs, out_specs=out_specs, axis_names={TENSOR_AXIS}, check_vma=False
    )


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _stacked(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)
