"""Turns XLA's persistent compilation cache on, by default: the second start of an engine compiles nothing."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import platformdirs
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh

from jpaged.execution.kv_dtype import resolve_kv_dtype
from jpaged.execution.mesh import platform
from pallas_kernels import cpu_objects

LEAST_FREE = 256 << 20
"""Bytes that should be free where compilations are kept; those of an engine take some tens of MiB."""


def enable_compilation_cache() -> str | None:
    """Turn the cache on in the user's cache folder, unless the user chose a folder; returns the folder in use.

    ``JAX_COMPILATION_CACHE_DIR`` or ``jax.config.update("jax_compilation_cache_dir", ...)`` choose another. Where the
    folder cannot be written there is no cache, which is said in a warning, and None is returned.
    """
    chosen = jax.config.values["jax_compilation_cache_dir"]
    folder = chosen or str(Path(platformdirs.user_cache_dir("jpaged")) / "xla")
    problem = None if "://" in folder else _problem(Path(folder))  # a bucket is for JAX to check
    if problem is not None:
        warnings.warn(
            f"compilations cannot be kept in {folder}: {problem}. Every start compiles anew; set "
            "JAX_COMPILATION_CACHE_DIR to a folder that can be written",
            UserWarning,
            stacklevel=2,
        )
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    if chosen is None:
        jax.config.update("jax_compilation_cache_dir", folder)
        # A step's small helpers compile in well under JAX's threshold of a second, and there are many of them.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return folder


@contextmanager
def compiled_anew() -> Iterator[None]:
    """Take nothing from XLA's cache on disk, and add nothing to it, while this lasts; in all threads of the process.

    What the cache gives cannot be serialised again by a CPU.
    """
    before = jax.config.values["jax_enable_compilation_cache"]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        reset_cache()  # JAX asks the setting once
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        reset_cache()


def _problem(folder: Path) -> str | None:
    """Return why a folder cannot keep compilations, or None where it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"jpaged")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return str(error)
    return f"{free >> 20} MiB are free, below {LEAST_FREE >> 20}" if free < LEAST_FREE else None


def precompile_attention_loops(mesh: Mesh, *, dtype: str, kv_cache_dtype: str, block_size: int) -> None:
    """Start a process that compiles attention's loops, where this machine has not yet compiled them: on a cold start
    that is half of the time, and needs nothing of the model but the dtype of its KV.

    Args:
        dtype: `EngineConfig.dtype`; what "auto" will mean is guessed, and a wrong guess costs the other process only.

    Raises:
        ValueError: as `resolve_kv_dtype`.
    """
    if platform(mesh) != "cpu" or cpu_objects.loaded() is not None or find_spec("numba") is None:
        return
    from pallas_kernels.paged_attention.numba_precompile import compile_ahead

    guessed = jnp.bfloat16 if dtype == "bfloat16" else jnp.float32
    compile_ahead(resolve_kv_dtype(kv_cache_dtype, guessed, mesh, block_size).name)
