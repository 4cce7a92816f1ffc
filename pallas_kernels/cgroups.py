"""Finds the cgroups of this process, whose limits are those of a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple


class Cgroup(NamedTuple):
    """A cgroup's folder, and the version by which its files are named."""

    version: Literal[1, 2]
    folder: Path


def cgroups(root: Path, controller: str) -> Iterator[Cgroup]:
    """Yield the cgroups of this process that a controller may limit, and those around them; none on a system without.

    A container may see its own as the top one.

    Args:
        root: the folder that has ``proc`` and ``sys``.
        controller: ``cpu`` or ``memory``, for example.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # another system than Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # cgroups of version 2 have one tree
            yield from (Cgroup(2, folder) for folder in _folders(root / "sys/fs/cgroup", path))
        elif controller in controllers.split(","):
            yield from (Cgroup(1, folder) for folder in _folders(root / "sys/fs/cgroup" / controller, path))


def _folders(top: Path, path: str) -> Iterator[Path]:
    yield top
    for part in Path(path).parts[1:]:
        top /= part
        yield top
