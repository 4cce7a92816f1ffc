"""Makes device meshes of hardware that this machine may not have, from descriptions."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jpaged.model_api import TENSOR_AXIS
from jpaged.planning.devices import Chip, Device
from pallas_kernels.gpu_launch import compiling_for

TPU_HOST = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Answers that libtpu would ask a TPU VM's metadata server for, and leave to compile while another process has the TPU;
set before jax is imported."""


CUDA_VERSION = "13.0.0"
"""Versions of a GPU's driver and libraries for XLA's compiler: the oldest that its plugin for CUDA 13 takes."""


def environment(device: Device, compiled: bool) -> dict[str, str]:
    """Return the environment variables of a process that plans for a device."""
    count = f"--xla_force_host_platform_device_count={device.count}"
    virtual = {} if compiled else {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()}
    return {"JAX_PLATFORMS": "cpu", **(TPU_HOST if device.chip.kind == "tpu" else {}), **virtual}


def target_mesh(device: Device, compiled: bool) -> Mesh:
    """Return the device's mesh for its compiler, or one of as many virtual CPU devices where nothing will be compiled
    for it.

    Raises:
        RuntimeError: the compiler is missing, or refuses the topology.
    """
    if not compiled or device.chip.kind == "cpu":
        devices: Any = jax.devices()[: device.count]
    elif device.chip.kind == "tpu":
        bounds = {} if device.chips_per_host is None else {"chips_per_host_bounds": device.chips_per_host}
        devices = topologies.get_topology_desc(device.topology, "tpu", **bounds).devices
    else:
        description = topologies.get_topology_desc(
            "gpu", "cuda", topology=f"1x1x{device.count}", target_config=gpu_target(device.chip)
        )
        devices = description.devices
    return Mesh(np.array(devices), (TENSOR_AXIS,))


def target_capability(device: Device) -> AbstractContextManager[None]:
    """Return a context in which kernels are traced for a GPU's compute capability; other devices need none."""
    if device.chip.cuda is None:
        return nullcontext()
    major, minor = device.chip.cuda.capability
    return compiling_for(10 * major + minor, device.chip.cuda.name)


def gpu_target(chip: Chip) -> str:
    """Return the ``GpuTargetConfigProto`` that XLA's compiler takes in place of a GPU."""
    cuda = chip.cuda
    assert cuda is not None, "only NVIDIA devices are described to XLA's GPU compiler"
    per_block = cuda.shared_bytes - 1024
    if cuda.capability < (8, 0):
        per_block = cuda.shared_bytes
    figures = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_core": cuda.shared_bytes,
        "shared_memory_per_block_optin": per_block,
        "threads_per_core_limit": cuda.threads,
        "core_count": cuda.cores,
        "fpus_per_core": cuda.units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(chip.bandwidth),
        "l2_cache_size": cuda.l2_bytes,
        "clock_rate_ghz": cuda.clock_ghz,
        "device_memory_size": chip.memory_bytes,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    major, minor = cuda.capability
    lines = [f"{name}: {value}" for name, value in figures.items()]
    # Without versions, or with those before 12.3, XLA records no calls in command buffers.
    lines += [
        f'{name}: "{CUDA_VERSION}"' for name in ("driver_version", "runtime_version", "compile_time_toolkit_version")
    ]
    lines.append(f"cuda_compute_capability {{ major: {major} minor: {minor} }}")
    return (
        f'gpu_device_info {{ {" ".join(lines)} }} platform_name: "CUDA" '
        f'dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{cuda.name}"'
    )
