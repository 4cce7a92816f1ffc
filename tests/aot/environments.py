"""Environments with the compilers of hardware this machine lacks, and programs run in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from forked_programs import run_forked

from jpaged.planning.child_process import environments_dir

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PATH = os.pathsep.join(str(path) for path in (ROOT, HERE, HERE.parent / "execution", HERE.parent / "pallas_kernels"))
IMPORTED = ("jax.experimental.pallas", "jax.experimental.pallas.tpu", "flax.nnx", "transformers")
"""Names the modules that most of the programs import. Triton is none of them: a variable says before its import whether
it interprets."""


@cache
def python_of(target: str) -> Path:
    """The Python of the ``tpu`` or ``cuda`` environment, made on first use; skips the test if it cannot be."""
    where = environments_dir() / target
    script = ["bash", ROOT / "scripts" / "aot_env.sh", target, where]
    made = subprocess.run(script, capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable})
    if made.returncode:
        last_words = (made.stderr or made.stdout).strip().splitlines()[-1:]
        pytest.skip(f"no {target} compiler: {where} could not be made: {' '.join(last_words)}")
    return where / "bin" / "python"


def run_program(target: str, program: str, *arguments: str, timeout: float = 600) -> str:
    """Standard output of ``tests/aot/<program>`` in the target's environment; its failure fails the test.

    "-m" as the program runs a module, the first argument.
    """
    done = run_forked(
        python_of(target),
        [program if program == "-m" else str(HERE / program), *arguments],
        os.environ | {"PYTHONPATH": PATH, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
        modules=IMPORTED,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{program} failed:\n{done.stderr[-4000:]}"
    return done.stdout


def run_case(target: str, case: str, *options: str) -> list[dict[str, Any]]:
    """The rows of a case of scripts/compiled_code, run in the target's environment; its failure fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        run_program(target, "-m", "scripts.compiled_code", case, *options, "--json", str(file))
        return json.loads(file.read_text())["rows"]
