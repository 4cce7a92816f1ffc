"""XLA's persistent compilation cache, on by default: the second start of an engine compiles nothing."""

from __future__ import annotations

from pathlib import Path

import jax
import platformdirs


def enable_compilation_cache() -> str:
    """Turn the cache on in the user's cache folder, unless the user chose a folder; returns the folder in use.

    ``JAX_COMPILATION_CACHE_DIR`` or ``jax.config.update("jax_compilation_cache_dir", ...)`` choose another.
    """
    chosen = jax.config.values["jax_compilation_cache_dir"]
    if chosen is None:
        chosen = str(Path(platformdirs.user_cache_dir("jpaged")) / "xla")
        jax.config.update("jax_compilation_cache_dir", chosen)
        # A step's small helpers compile in well under JAX's threshold of a second, and there are many of them.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return chosen
