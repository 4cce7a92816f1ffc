"""Run loops for Intel's AMX on a processor without it, in a process of its own, by `amx_emulator.c`."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from pallas_kernels import cpu_features, cpu_objects

SOURCE = Path(__file__).with_suffix(".c")
PROCESSOR = cpu_objects.PROCESSORS["x86-64-amx"]
HAS_AMX = "amx_tile" in cpu_objects.flags_here()
LACKING = sorted({flag for flag in PROCESSOR.flags if not flag.startswith("amx")} - cpu_objects.flags_here())
"""The flags that this machine lacks, except AMX's, to run such loops."""
COUNTED = ("sizes", "releases", "zeros", "loads", "stores", "bfloat16 products", "int8 products")


def run(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process whose loops are compiled for AMX. It may call `counted`.

    Args:
        folder: gets the emulator and what the process keeps.
    """
    environment = os.environ | {
        "NUMBA_CPU_NAME": PROCESSOR.cpu,
        "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in PROCESSOR.features),
        cpu_objects.VARIABLE: "none",
        "XDG_CACHE_HOME": str(folder / "caches"),
        "PYTHONPATH": os.pathsep.join(map(str, SOURCE.parents[:3])),
    }
    library = folder / "amx_emulator.so"
    compiler = [os.environ.get("CC", "cc"), "-O3", "-mfma", "-shared", "-fPIC"]
    subprocess.run([*compiler, "-o", str(library), str(SOURCE), "-lm"], check=True)
    begun = f"from amx_emulator import begin, counted\nbegin({str(library)!r})\n{code}"
    command = [sys.executable, "-c", begun, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)


_emulator: ctypes.CDLL | None = None


def begin(library: str) -> None:
    """Emulate from now on in this process, where the processor has no AMX; Linux then need not permit anything."""
    global _emulator
    if not HAS_AMX:
        _emulator = ctypes.CDLL(library)
        _emulator.amx_begin()
        cpu_features.has_amx = lambda: True


def counted() -> dict[str, int] | None:
    """Return how many instructions were emulated; None if the processor ran them."""
    if _emulator is None:
        return None
    found = (ctypes.c_long * len(COUNTED))()
    _emulator.amx_counts(found)
    return dict(zip(COUNTED, found, strict=True))
