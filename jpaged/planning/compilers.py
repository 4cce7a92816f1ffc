"""Finds the compilers of other hardware: in this environment, or in one made for them."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import platformdirs

_PACKAGES = {"cpu": ("jaxlib",), "tpu": ("libtpu",), "cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin")}
"""Any of these compiles for the kind of device."""


def environments_dir() -> Path:
    """Return where environments called ``tpu`` and ``cuda`` are looked for: ``$JPAGED_AOT_ENVS``, or the user's
    cache."""
    named = os.environ.get("JPAGED_AOT_ENVS")
    return Path(named) if named else Path(platformdirs.user_cache_dir("jpaged")) / "aot-envs"


def compiler_python(kind: str, environment: str | Path | None = None) -> Path | None:
    """Return the Python with a compiler for a kind of device; None where there is none.

    Args:
        kind: "cpu", "tpu" or "cuda".
        environment: a virtual environment to take; by default this one, else that in `environments_dir`.

    Raises:
        ValueError: `environment` is no virtual environment.
    """
    if environment is not None:
        python = Path(environment).expanduser() / "bin" / "python"
        if not python.exists():
            raise ValueError(f"compiler_env={str(environment)!r} is no virtual environment: it has no bin/python")
        return python
    if any(find_spec(package) is not None for package in _PACKAGES[kind]):
        return Path(sys.executable)
    python = environments_dir() / kind / "bin" / "python"
    return python if python.exists() else None
