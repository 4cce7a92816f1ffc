"""Loads the loops of CPUs that were compiled ahead, so that a first answer waits for no compiler and needs no Numba.

`pallas_kernels.build_objects` makes, for each of `PROCESSORS`, a library NAME.so and a list of its custom calls,
NAME.json. The best one whose instructions this machine has is used, for all of a process' calls that it lists; Numba
compiles the others. The list says which sources it is made of: a library of other sources is not used.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax

from pallas_kernels.sources import digest

VARIABLE = "PALLAS_KERNELS_OBJECTS"
"""The environment variable that names the folder of the libraries, or ``none`` for Numba alone."""
FOLDER = Path(__file__).parent / "objects"
"""Where a wheel has them."""
FORMAT = 1
"""Version of what NAME.json says."""

Names = str | tuple[str, ...]
"""The names of the custom calls that a function registers, as it returns them."""

logger = logging.getLogger(__name__)
_registering = threading.Lock()
_known: set[str] = set()


class Processor(NamedTuple):
    """Describes the processors that one library is compiled for.

    Attributes:
        machine: the architecture, as `platform.machine` names it.
        cpu: LLVM's name of the processor.
        features: what it has besides, by LLVM's names.
        flags: what Linux must list in /proc/cpuinfo.
    """

    machine: str
    cpu: str
    features: tuple[str, ...]
    flags: tuple[str, ...]


_V3 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
_V3_FLAGS = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_VNNI, _VNNI_FLAGS = (*_V3, *_AVX512, "avx512vnni"), (*_V3_FLAGS, *_AVX512, "avx512_vnni")
_BF16, _BF16_FLAGS = (*_VNNI, "avx512bf16", "avx512vbmi"), (*_VNNI_FLAGS, "avx512_bf16", "avx512vbmi")
_AMX = ("amx-tile", "amx-bf16", "amx-int8")

PROCESSORS = {
    "x86-64-amx": Processor(
        "x86_64", "x86-64-v4", (*_BF16, *_AMX), (*_BF16_FLAGS, *(name.replace("-", "_") for name in _AMX))
    ),
    "x86-64-avx512bf16": Processor("x86_64", "x86-64-v4", _BF16, _BF16_FLAGS),
    "x86-64-avx512vnni": Processor("x86_64", "x86-64-v4", _VNNI, _VNNI_FLAGS),
    "x86-64-v3": Processor("x86_64", "x86-64-v3", _V3, _V3_FLAGS),
    "aarch64-dotprod": Processor("aarch64", "generic", ("neon", "dotprod"), ("asimd", "asimddp")),
}
"""The processors by the names of their libraries, best first."""


@dataclass(frozen=True)
class Objects:
    """Holds a library of loops.

    Attributes:
        library: its functions take an ``XLA_FFI_CallFrame`` each, and have the names of custom calls.
        features: instructions that its loops are written for, by LLVM's names.
        calls: the names of the custom calls that `call_key` stands for.
    """

    library: Any
    features: frozenset[str]
    calls: dict[str, Names]


def call_key(module: str, function: str, arguments: tuple[Any, ...]) -> str:
    """Return what identifies, in the list of a library, a call of a function that registers custom calls."""
    return f"{module}:{function}({', '.join(map(repr, arguments))})"


def registered(key: str) -> Names | None:
    """Make the custom calls known to XLA that a key stands for, and return their names; None if no library has them."""
    objects = loaded()
    if objects is None or (names := objects.calls.get(key)) is None:
        return None
    make_known(names, objects.library.__getitem__)
    return names


def make_known(names: Names, function: Callable[[str], Any]) -> None:
    """Make C functions known to XLA as custom calls of their names; a second call for a name does nothing.

    Args:
        function: gives the function of a name, or its address.
    """
    with _registering:
        for name in all_of(names):
            if name not in _known:
                jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function(name)), platform="cpu")
                _known.add(name)


def all_of(names: Names) -> tuple[str, ...]:
    """Return the names in a tuple, also where there is only one."""
    return (names,) if isinstance(names, str) else names


@cache
def loaded() -> Objects | None:
    """Return the library for this machine; None if there is none.

    Raises:
        ValueError: `VARIABLE` names no folder.
    """
    given = os.environ.get(VARIABLE)
    if given == "none":
        return None
    folder = Path(given) if given else FOLDER
    if given and not folder.is_dir():
        raise ValueError(f"{VARIABLE}={given!r} is no folder; it may be 'none', too")
    if sys.platform != "linux" or not folder.is_dir():
        return None
    for name in PROCESSORS:
        if runs_here(name) and (found := _read(folder / f"{name}.json")) is not None:
            return found
    return None


def _read(path: Path) -> Objects | None:
    """Return the library whose list is at a path; None if it is not there or not of these sources."""
    try:
        listed = json.loads(path.read_text())
        if listed["format"] != FORMAT or listed["sources"] != digest(listed["modules"]):
            logger.warning("loops compiled ahead are of other sources and are not used: %s", path)
            return None
        library = ctypes.CDLL(str(path.with_suffix(".so")))
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("loops compiled ahead cannot be loaded: %s", error)
        return None
    calls = {key: names if isinstance(names, str) else tuple(names) for key, names in listed["calls"].items()}
    logger.info("kernels of the CPU: compiled ahead, %s", path.stem)
    return Objects(library, frozenset(listed["features"]), calls)


def runs_here(name: str) -> bool:
    """Tell whether this machine has the instructions of one of `PROCESSORS`."""
    processor = PROCESSORS[name]
    return processor.machine == platform.machine() and flags_here().issuperset(processor.flags)


def flags_here() -> frozenset[str]:
    """Return what Linux says that every processor of this machine has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(found[0]).intersection(*found[1:]) if found else frozenset()
