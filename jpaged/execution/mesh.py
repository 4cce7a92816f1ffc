"""Makes the mesh of the devices that an engine runs on, and says how its arrays lie on them."""

from __future__ import annotations

from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jpaged.execution.replicas import DATA_AXIS, own_sharding
from jpaged.model_api import TENSOR_AXIS
from pallas_kernels.platform import Impl, resolve_impl

HostOrDevice: TypeAlias = np.ndarray | Array
"""NumPy where the host fills a batch in, traced JAX arrays inside the step."""


def make_mesh(tensor_parallel_size: int, data_parallel_size: int = 1) -> Mesh:
    """Return a mesh of the first devices over the tensor axis; with several replicas, over the data and the tensor
    axis.

    Where `jax.distributed` joined several processes, it spans the devices of all of them.

    Raises:
        ValueError: there are fewer devices, or the processes have more; or replicas over several processes.
    """
    devices, processes = jax.devices(), jax.process_count()
    if data_parallel_size > 1 and processes > 1:
        raise ValueError(f"data_parallel_size={data_parallel_size} needs one process, and there are {processes}")
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


def replicate(array: np.ndarray, mesh: Mesh) -> jax.Array:
    """Return an array on every device of each replica; where processes share the mesh, each brings the same one."""
    if is_local(mesh):
        return jax.device_put(array, own_sharding(mesh))
    # device_put would compare the processes' arrays, which takes a collective and waits for it.
    return jax.make_array_from_callback(array.shape, own_sharding(mesh), lambda index: array[index])


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
