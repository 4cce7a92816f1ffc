"""Compiles the CPU loops of attention and of rows in a separate process, while this one does other things.

Numba takes ten seconds for them, half of a cold start, once per machine and version of this package.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from pallas_kernels import kept_objects
from pallas_kernels.cpu_cores import num_cores
from pallas_kernels.cpu_objects import call_key

logger = logging.getLogger(__name__)

_MODULE = "pallas_kernels.paged_attention.cpu_call"
_COMMAND = """
import os, sys, threading, time

def end_with_parent():
    # Standard input is a pipe, of which the other end is closed when the parent has ended, however it did. It is read
    # without Python's buffer, whose lock this thread would hold: Python aborts if it finds that at its own end.
    os.read(0, 1)
    try:
        import fcntl
        with open(sys.argv[2], "ab") as file:
            while True:  # as long as another process holds a shared lock: it waits for these loops
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.2)
    finally:
        os._exit(1)

threading.Thread(target=end_with_parent, daemon=True).start()
from pallas_kernels.row_ops.cpu_kernel import add_norm_target, gate_target, norm_target
from pallas_kernels.rotated_heads.cpu_kernel import target as rotating_target
# These take a second each, and a model's first layer asks for them before it attends.
norm_target(), add_norm_target(), gate_target("silu"), rotating_target()
from pallas_kernels.paged_attention.cpu_call import target
target(sys.argv[1])
"""


def compile_ahead(dtype: str) -> subprocess.Popen[bytes] | None:
    """Start a process that compiles the loops for views of this dtype and keeps them on disk. When this process needs
    them, it loads them from there, or waits until they are complete.

    If that process fails, this one compiles the loops itself. It ends with this one, however that ends, unless another
    one waits for the loops too.

    Returns:
        The process; None if the loops are on disk already or another engine's process compiles them, or if this process
        has one core or cannot start another.
    """
    path = kept_objects.path_of(_MODULE, call_key(_MODULE, "target", (dtype,)))
    if path is None or path.exists() or num_cores() < 2:
        return None
    # Held until the other process ends, which another thread of this one waits for.
    alone = FileLock(path.with_suffix(".process"), thread_local=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        alone.acquire(timeout=0)
    except Timeout:
        _await(path.with_suffix(".waiting"))
        return None
    except (OSError, NotImplementedError) as error:  # nor can loops be kept there: each process compiles its own
        logger.debug("no process compiles ahead: %s is not locked: %s", alone.lock_file, error)
        return None
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, dtype, str(path.with_suffix(".waiting"))],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        alone.release()
        return None

    def wait() -> None:
        process.wait()  # leaves no zombie
        alone.release()

    threading.Thread(target=wait, name="jpaged-loops", daemon=True).start()
    return process


_awaited: list[IO[bytes]] = []
"""Files whose shared locks this process holds until it ends."""


def _await(file: Path) -> None:
    """Let another engine's process go on after its parent has ended, as long as this process lives."""
    with contextlib.suppress(OSError, ImportError):  # where there are no such locks it ends, and this one compiles
        import fcntl

        opened = file.open("ab")
        _awaited.append(opened)
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
