"""Says how another engine is started, so that it has all that jpaged has, and ends all that it has started."""

from __future__ import annotations

import os
from contextlib import suppress
from ctypes.util import find_library
from pathlib import Path


def peer_variables(name: str, folder: Path) -> dict[str, str]:
    """Return variables to set for an engine.

    By itself vLLM leaves one core to its front end, which is half of a machine that has two. Here it computes on all of
    them, as its documentation has it with its allocator and its threads' library, where these are installed (Debian's
    libtcmalloc-minimal4; libiomp5 in the environment). All other engines take every core by themselves.

    Args:
        name: of the engine, as in ``--env NAME=DIR``.
        folder: its environment.
    """
    if name != "vllm":
        return {}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    threads = folder.absolute() / "lib" / "libiomp5.so"
    wanted = [find_library("tcmalloc_minimal"), str(threads) if threads.exists() else None]
    preloaded = [os.environ.get("LD_PRELOAD"), *wanted]
    variables = {"OMP_NUM_THREADS": str(len(cores)), "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    if found := [library for library in preloaded if library]:
        variables["LD_PRELOAD"] = ":".join(found)
    return variables


def signal_with_descendants(process: int, number: int) -> None:
    """Send a signal to a process and all that it started, whatever groups they have made (Linux; elsewhere to itself
    alone)."""
    for each in _with_descendants(process):
        with suppress(ProcessLookupError):
            os.kill(each, number)


def _with_descendants(process: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [process]
    for each in found:
        found += children.get(each, [])
    return found
