"""Counts the cores that this process may use, and lets XLA start as many threads and no more."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from pallas_kernels.cgroups import cgroups

VARIABLE = "NPROC"
"""The environment variable from which XLA takes the number of its threads as it starts."""


@cache
def num_cores() -> int:
    """Return the number of cores: those that the process may run on, and no more than its cgroups have time for.

    Virtual processors that share a core count once: products keep its arithmetic units busy from one of them, and
    reading weights its path to memory.

    A container with ``--cpus=2`` sees all cores of its machine and gets the time of two: with a thread for each core it
    uses that up at once, and then all of them wait for the rest of each tenth of a second.
    """
    return max(1, min(physical(Path("/"), _seen()), math.ceil(min(quota(Path("/")), 2**16))))


def limit_threads() -> None:
    """Let XLA start a thread for each of `num_cores()`, where these are fewer than it sees.

    It has no effect once JAX has devices. A number that the user has set is kept.
    """
    if num_cores() < len(_seen()):
        os.environ.setdefault(VARIABLE, str(num_cores()))


def physical(root: Path, processors: Iterable[int]) -> int:
    """Return the number of cores that virtual processors lie on; one that the system tells nothing of is its own.

    Args:
        root: the folder that has ``sys``.
    """
    topology = root / "sys/devices/system/cpu"
    return len({_siblings(topology / f"cpu{number}" / "topology") or str(number) for number in processors})


def _siblings(topology: Path) -> str | None:
    for name in ("core_cpus_list", "thread_siblings_list"):  # the newer name first
        try:
            return (topology / name).read_text().strip()
        except OSError:
            continue
    return None


def quota(root: Path) -> float:
    """Return how many cores' worth of time the cgroups of this process have, the least of them; infinity if no limit.

    Args:
        root: the folder that has ``proc`` and ``sys``.
    """
    of = {1: _of_version_1, 2: _of_version_2}
    return min((of[version](folder) for version, folder in cgroups(root, "cpu")), default=math.inf)


def _of_version_2(folder: Path) -> float:
    try:
        time, period = (folder / "cpu.max").read_text().split()
        return math.inf if time == "max" else int(time) / int(period)
    except (OSError, ValueError):
        return math.inf


def _of_version_1(folder: Path) -> float:
    try:
        time, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return math.inf
    return time / period if time > 0 else math.inf


def _seen() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
