"""How thorough a run of the tests is: all that a commit has to pass, or with ``--nightly`` all there is."""

import importlib.util
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

NIGHTLY = False
"""Whether ``--nightly`` was given; set before any test module is imported."""


QUICK = {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_parallel_codegen_split_count": "1"}
"""Flags with which XLA compiles a program for a CPU in a third of the time: loops are written as LLVM's code at once,
without MLIR between, and in one module."""


def quick_compiler_flags() -> list[str]:
    """Return `QUICK` for the variable XLA_FLAGS, as far as this jaxlib knows them: an unknown flag ends the process."""
    found = importlib.util.find_spec("jaxlib")
    library = Path(found.origin).with_name("libjax_common.so") if found and found.origin else None
    if library is None or not library.exists():
        return []
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return [f"--{name}={value}" for name, value in QUICK.items() if text.find(name.encode()) >= 0]


def examples(nightly: int, of: int = 3) -> int:
    """Return how many examples a property is tried on; where the run is not nightly one `of` so many of them."""
    return nightly if NIGHTLY else -(-nightly // of)


def by_name(cases: Mapping[str, Any], *often: str) -> list[Any]:
    """Return the parameters of a test by their names; those that are not named again are for the night."""
    assert set(often) <= cases.keys()
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name,
            marks=() if name in often else pytest.mark.nightly,
        )
        for name, case in cases.items()
    ]


def rarely(*values: Any) -> Any:
    """Return one set of a test's parameters, for the night."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def for_the_night() -> frozenset[str]:
    """Return the node ids of tests/for_the_night.txt, which says how they were chosen."""
    lines = Path(__file__).with_name("for_the_night.txt").read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))
