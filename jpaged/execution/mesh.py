"""Makes the mesh of the devices that an engine runs on, says how its arrays lie on them, and maps programs over it.

On a mesh of ``(data, tensor)`` the arrays of all replicas of a data-parallel engine are stacked along a first axis,
which is sharded over `data`, and one program computes for all of them; their pools are one array whose shards are split
over both. On a mesh of `tensor` alone there is one replica, and nothing is stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jpaged.model_api import TENSOR_AXIS
from pallas_kernels.platform import Impl, resolve_impl

HostOrDevice: TypeAlias = np.ndarray | Array
"""NumPy where the host fills a batch in, traced JAX arrays inside the step."""


def make_mesh(tensor_parallel_size: int, data_parallel_size: int = 1) -> Mesh:
    """Return a mesh of the first devices over the tensor axis; with several replicas, over the data and the tensor
    axis.

    Where `jax.distributed` joined several processes, it spans the devices of all of them.

    Raises:
        ValueError: there are fewer devices, or the processes have more.
    """
    devices, processes = jax.devices(), jax.process_count()
    size = tensor_parallel_size * data_parallel_size
    if size > len(devices):
        asked = f"tensor_parallel_size={tensor_parallel_size}"
        if data_parallel_size > 1:
            asked = f"data_parallel_size={data_parallel_size} times {asked}"
        owner = "this process" if processes == 1 else f"{processes} processes"
        raise ValueError(f"{asked} is above the {len(devices)} {devices[0].platform} device(s) of {owner}")
    if processes > 1 and tensor_parallel_size != len(devices):
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} leaves some of the {len(devices)} devices of {processes} "
            f"processes idle; a run of several processes takes them all"
        )
    if data_parallel_size > 1:
        grid = np.array(devices[:size]).reshape(data_parallel_size, tensor_parallel_size)
        return Mesh(grid, (DATA_AXIS, TENSOR_AXIS))
    return Mesh(np.array(devices[:size]), (TENSOR_AXIS,))


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """Return a sharding over `mesh`; without axes it is replicated."""
    return NamedSharding(mesh, PartitionSpec(*axes))


def is_local(mesh: Mesh) -> bool:
    """Tell whether all of the mesh's devices belong to this process."""
    return sharding(mesh).is_fully_addressable


def replicate(arrays: Any, mesh: Mesh) -> Any:
    """Return an array, or a tree of them, on every device of each replica; where processes share the mesh, each brings
    the same ones."""
    placed = own_sharding(mesh)
    if is_local(mesh):
        return jax.device_put(arrays, placed)
    # device_put would compare the processes' arrays, which takes a collective and waits for it.
    return jax.tree.map(lambda array: jax.make_array_from_callback(array.shape, placed, array.__getitem__), arrays)


def to_host(arrays: Any) -> Any:
    """Return an array of the devices, or a tree of them, as NumPy arrays; blocks until they are computed."""
    # `device_get` handles a tree, which for one small array takes longer than copying it.
    return np.asarray(arrays) if isinstance(arrays, jax.Array) else jax.device_get(arrays)


def platform(mesh: Mesh) -> str:
    """Return the platform of the mesh's devices, ``cpu``, ``gpu`` or ``tpu``, also when they are only a compiler's
    target."""
    name = mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else name


def row_impl(mesh: Mesh) -> Impl:
    """Return which version of `pallas_kernels.row_ops` runs on whole arrays of a mesh."""
    return resolve_impl(None) if alone_on_cpu(mesh) else "xla"


def alone_on_cpu(mesh: Mesh) -> bool:
    """Return whether every array of the engine lies whole on one CPU, as custom calls need."""
    return mesh.size == 1 and platform(mesh) == "cpu"


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


def own_shapes(arrays: T, mesh: Mesh) -> T:
    """Return the shapes of a tree of arrays that lie as `own_sharding` says."""
    placed = own_sharding(mesh)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), arrays)


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


def most_of_replicas(number: Int[Array, ""]) -> Int[Array, ""]:
    """Return the largest of all replicas' numbers within `each_replica`, so that all go through a loop as often: an
    operation within it may wait for the devices of all. Elsewhere it is the number itself."""
    mesh = jax.sharding.get_abstract_mesh()
    return number if mesh.empty or DATA_AXIS not in mesh.manual_axes else lax.pmax(number, DATA_AXIS)


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
