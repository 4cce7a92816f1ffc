"""Finds the environment of a compiler for devices that are not here, and runs a script again in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def default_env(target: str) -> Path:
    """Return where the environment of a target's compiler is, "cuda" or "tpu", unless the user says otherwise."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("JPAGED_AOT_ENVS", cache / "jpaged" / "aot-envs")) / target


def run_again_in(env: Path, target: str) -> None:
    """Replace this process by one in the environment `env` of a target's compiler, which is made if need be."""
    make = ["bash", str(ROOT / "scripts" / "aot_env.sh"), target, str(env)]
    subprocess.run(make, check=True, env=os.environ | {"PYTHON": sys.executable})
    python = str(env / "bin" / "python")
    os.execve(python, [python, *sys.argv], os.environ | {"PYTHONPATH": str(ROOT)})
