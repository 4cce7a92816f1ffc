"""Compiles the CPU loops of attention and of rows in a separate process, while this one does other things.

Numba takes twenty seconds for them, half of a cold start, once per machine and version of this package. Import this
module only where Numba is installed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

from pallas_kernels import ffi

_COMMAND = """
import sys
import pallas_kernels.row_ops.cpu_kernel
import pallas_kernels.rotated_heads.cpu
from pallas_kernels.row_ops.cpu_kernel import gate_target
gate_target("silu")  # these take a second each, and a model's first layer asks for them before it attends
from pallas_kernels.paged_attention.cpu_call import target
target(sys.argv[1])
"""


def compile_ahead(dtype: str) -> subprocess.Popen[bytes] | None:
    """Start a process that compiles the loops for views of this dtype and keeps them on disk. When this process needs
    them, it loads them from there, or waits until they are complete.

    If that process fails, this one compiles the loops itself.

    Returns:
        The process; None if the loops are on disk already, or if this process has one core or cannot start another.
    """
    if is_compiled(dtype) or _cores() < 2:
        return None
    with contextlib.suppress(OSError):
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, dtype],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        threading.Thread(target=process.wait, name="jpaged-loops", daemon=True).start()  # leaves no zombie
        return process
    return None


def is_compiled(dtype: str) -> bool:
    """Tell whether a process on this machine has compiled the loops for views of this dtype and stored them."""
    return _mark(dtype).exists()


def note_compiled(dtype: str) -> None:
    """Note that the loops are on disk."""
    with contextlib.suppress(OSError):  # a folder that cannot be written holds no loops either
        _mark(dtype).touch()


def _mark(dtype: str) -> Path:
    return ffi.cache_folder() / f"attention-{dtype}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
