"""Has the loops that a CPU's attention runs compiled while the model is loaded."""

from __future__ import annotations

from importlib.util import find_spec

import jax.numpy as jnp
from jax.sharding import Mesh

from jpaged.execution.kv_dtype import resolve_kv_dtype
from jpaged.execution.mesh import platform


def compile_loops_ahead(mesh: Mesh, *, dtype: str, kv_cache_dtype: str, block_size: int) -> None:
    """Start a process that compiles attention's loops, where this machine has not yet compiled them: on a cold start
    that is half of the time, and needs nothing of the model but the dtype of its KV.

    Args:
        dtype: `EngineConfig.dtype`; what "auto" will mean is guessed, and a wrong guess costs the other process only.

    Raises:
        ValueError: as `resolve_kv_dtype`.
    """
    if platform(mesh) != "cpu" or find_spec("numba") is None:
        return
    from pallas_kernels.paged_attention.cpu_ahead import compile_ahead

    guessed = jnp.bfloat16 if dtype == "bfloat16" else jnp.float32
    compile_ahead(resolve_kv_dtype(kv_cache_dtype, guessed, mesh, block_size).name)
