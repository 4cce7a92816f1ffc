"""Resolves the dtype of the pool, and tells which devices compute with values of one byte."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jpaged.execution.mesh import platform
from pallas_kernels.kv_codes import TPU_TILE, check_tpu_block
from pallas_kernels.platform import why_no_triton

_DTYPES = {"bfloat16": jnp.bfloat16, "int8": jnp.int8, "fp8": jnp.uint8}
"""Dtypes that the pool's elements are held in; see `pallas_kernels.kv_codes`."""
_FP8_CAPABILITY = (8, 9)


def check_float8(setting: str, device: jax.Device) -> None:
    """Raise ValueError, naming the setting, when the device has no float8."""
    kind, capability = device.device_kind, str(getattr(device, "compute_capability", ""))
    if device.platform == "tpu" and "7" not in kind:
        raise ValueError(f"{setting}: {kind} has no float8; int8 takes the same memory")
    numbers = capability.split(".")  # an AMD GPU has a name there, and XLA converts float8 on it
    if all(map(str.isdigit, numbers)) and tuple(map(int, numbers)) < _FP8_CAPABILITY:
        raise ValueError(
            f"{setting}: {kind} of compute capability {capability} has no float8, which takes "
            f"{'.'.join(map(str, _FP8_CAPABILITY))}; int8 takes the same memory"
        )


def resolve_kv_dtype(asked: str, dtype: Any, mesh: Mesh, block_size: int) -> np.dtype:
    """Return the dtype of the pool; bfloat16 is held as its bits, uint16, on a CPU (`pallas_kernels.kv_codes`).

    Args:
        asked: the value of kv_cache_dtype.
        dtype: the model's dtype.
        block_size: tokens of a block.

    Raises:
        ValueError: the mesh's devices, or the kernels they run, cannot use it, or not with such blocks.
    """
    device = mesh.devices.flat[0]
    if asked == "fp8" and why_no_triton(str(getattr(device, "compute_capability", ""))):
        check_float8(f"kv_cache_dtype={asked!r}", device)  # the Triton kernels need no instruction for it
    found = np.dtype(dtype if asked == "auto" else _DTYPES[asked])
    if asked == "bfloat16" and platform(mesh) != "cpu" and found != dtype:
        raise ValueError(f"kv_cache_dtype='bfloat16' with dtype={np.dtype(dtype).name!r} is for CPUs")
    if found == jnp.bfloat16 and platform(mesh) == "cpu":
        return np.dtype(np.uint16)
    if device.platform == "tpu":
        check_tpu_block(block_size, found)
    return found


def rows_tile(mesh: Mesh) -> int:
    """Return the number of rows of which a block with scales is a multiple; see
    `pallas_kernels.kv_codes.block_rows`."""
    return TPU_TILE if platform(mesh) == "tpu" else 1
