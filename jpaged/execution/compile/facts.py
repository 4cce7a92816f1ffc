"""Lists what compiled programs depend on besides their shapes: code, versions, machine, and how weights are held."""

from __future__ import annotations

import hashlib
import os
import platform as machine
import re
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jpaged.execution.mesh import platform
from pallas_kernels.held_matrix import is_held
from pallas_kernels.platform import GPU_SWITCH, gpu_choice

PACKAGES = {
    "cpu": ("jax", "jaxlib", "flax", "numpy", "numba", "llvmlite"),
    "gpu": ("jax", "jaxlib", "flax", "numpy", "jax-triton", "triton", "jax-cuda12-pjrt", "jax-cuda13-pjrt"),
    "tpu": ("jax", "jaxlib", "flax", "numpy", "libtpu"),
}
"""Packages whose versions a platform's compiled programs depend on; that one is not installed counts too."""
CODE = ("jpaged", "pallas_kernels", "jpaged_models")


def machine_facts(mesh: Mesh) -> dict[str, Any]:
    """Return the facts of this installation and machine that compilation depends on, besides code, as plain data."""
    return {
        **device_facts(mesh),
        **({GPU_SWITCH: gpu_choice()} if platform(mesh) == "gpu" else {}),
        "jpaged": _version("jpaged"),
        **{f"versions.{name}": _version(name) for name in PACKAGES.get(platform(mesh), PACKAGES["gpu"])},
        "processor": _processor() if platform(mesh) == "cpu" else None,
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "LIBTPU_INIT_ARGS": os.environ.get("LIBTPU_INIT_ARGS", ""),
    }


def device_facts(mesh: Mesh) -> dict[str, Any]:
    """Describe the devices that programs are for; they may be only a compiler's target."""
    return {
        "platform": platform(mesh),
        "device_kind": mesh.devices.flat[0].device_kind,
        "devices": [[axis, size] for axis, size in mesh.shape.items()],
    }


def weight_facts(params: Any) -> dict[str, Any]:
    """Return how weights, or their shapes, are held: how many in which arrays, and a hash of all that a program sees.

    A setting says what weights become that are loaded; a saved checkpoint's are as it holds them.
    """
    held = Counter(map(_arrays_of, jax.tree.leaves(params, is_leaf=is_held)))
    leaves, tree = jax.tree.flatten(params)
    seen = repr((str(tree), [(leaf.shape, str(leaf.dtype)) for leaf in leaves]))
    return {
        "weights.held": dict(sorted(held.items())),
        "weights.shapes": hashlib.sha256(seen.encode()).hexdigest()[:32],
    }


def _arrays_of(leaf: Any) -> str:
    """Return the name of a parameter's holder class, with its arrays' dtypes."""
    dtypes = ", ".join(str(part.dtype) for part in jax.tree.leaves(leaf))
    return f"{type(leaf).__name__}({dtypes})" if is_held(leaf) else dtypes


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def code_digest(family: type) -> str:
    """Return a hash of the Python files, and their names, that compilation depends on.

    Args:
        family: the model's class, which may come from another package.
    """
    found = hashlib.sha256()
    for package in sorted({*CODE, family.__module__.partition(".")[0]}):
        spec = find_spec(package)
        for folder in spec.submodule_search_locations or () if spec is not None else ():
            for file in sorted(Path(folder).rglob("*.py")):
                found.update(f"{package}/{file.relative_to(folder).as_posix()}\0".encode())
                found.update(file.read_bytes())
    return found.hexdigest()[:32]


def _processor() -> str:
    """Return the processor's architecture and a hash of the instructions it has; programs of a CPU are compiled for
    them."""
    try:
        flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        known = " ".join(sorted(flags[1].split())) if flags else machine.processor()
    except OSError:
        known = machine.processor()
    return f"{machine.machine()} {hashlib.sha256(known.encode()).hexdigest()[:16]}"
