"""Runs a program of the tests in a process of its own with virtual devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from forked_programs import run_forked

IMPORTED = ("torch", "transformers.generation", "jax.experimental.pallas", "flax.nnx", "jpaged.llm")
"""Names the modules that most of the programs import."""


def printed_on_devices(count: int, program: Path, *arguments: object) -> Any:
    """Return what the last line that a program prints says."""
    run = run_on_devices(count, program, *arguments)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def run_on_devices(count: int, program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program, which finds the modules that this process finds and compiles as this process does."""
    return run_forked(sys.executable, [str(program), *map(str, arguments)], with_devices(count), modules=IMPORTED)


def with_devices(count: int) -> dict[str, str]:
    """Return the variables of a process that has `count` virtual devices, and else those of this one."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}".strip()
    path = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
