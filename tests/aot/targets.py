"""Hardware to compile for without having it: device meshes made from a topology's description.

Run inside an environment that `scripts/aot_env.sh` made (libtpu, or the CUDA plugin), in a process of its own:
call `describe_tpu_host` before jax is imported.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.sharding import Mesh

H200 = """
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150754820096 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA"  dnn_version_info { major: 9 minor: 10 patch: 0 }  device_description_str: "NVIDIA H200"
"""
"""An H200 as a ``GpuTargetConfigProto``."""

AXIS = "tensor"


def describe_tpu_host() -> None:
    """Set what libtpu otherwise asks a TPU VM's metadata server for; before jax is imported."""
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        JAX_PLATFORMS="cpu",
        TPU_ACCELERATOR_TYPE="v5litepod-8",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # the tests may run beside another compilation
    )


def tpu_mesh(name: str = "v5e:2x4") -> Mesh:
    """All devices of a TPU topology, e.g. ``v4:2x2x1``, ``v5e:2x4``, ``v6e:2x2``, on the axis ``tensor``."""
    describe_tpu_host()
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    return Mesh(np.array(devices), (AXIS,))


def h200_mesh(n: int = 8) -> Mesh:
    """`n` H200s of one host on the axis ``tensor``."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    devices = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology=f"1x1x{n}", target_config=H200
    ).devices
    return Mesh(np.array(devices), (AXIS,))
