"""The devices an engine runs on and how its arrays lie on them."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged.model_api import TENSOR_AXIS


def make_mesh(tensor_parallel_size: int) -> Mesh:
    """A mesh of the first `tensor_parallel_size` devices over the tensor axis.

    Raises:
        ValueError: there are fewer devices.
    """
    devices = jax.devices()
    if tensor_parallel_size > len(devices):
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} is above the {len(devices)} "
            f"{devices[0].platform} device(s) of this process"
        )
    return Mesh(np.array(devices[:tensor_parallel_size]), (TENSOR_AXIS,))


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """A sharding over `mesh`; no axes = replicated."""
    return NamedSharding(mesh, PartitionSpec(*axes))


def platform(mesh: Mesh) -> str:
    """``cpu``, ``gpu`` or ``tpu``: what the mesh's devices are, also when they are only a compiler's target."""
    name = mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else name
