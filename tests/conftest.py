"""What a second run of the tests need not compile again: set before anything imports jax, for subprocesses too."""

import os
from pathlib import Path

import platformdirs

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(platformdirs.user_cache_dir("jpaged")) / "xla-tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
