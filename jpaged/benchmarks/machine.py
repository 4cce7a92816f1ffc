"""Tells on what a measurement was made."""

from __future__ import annotations

import os
from datetime import date
from importlib.metadata import version
from pathlib import Path


def this_machine() -> str:
    """Return the cores, their model, jax's version, today's date and, where others load the cores, how much."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    others = f", loaded by others too (a mean of {load:.0f} processes)" if load > 1.5 * cores else ""
    core = "core" if cores == 1 else "cores"
    return f"{cores} {core} of {_processor()}, jax {version('jax')}, {date.today():%Y-%m-%d}{others}"


def _processor() -> str:
    """Return the processor's name as Linux has it, with what it multiplies small numbers by."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "an unnamed processor"
    fields = dict(line.replace("\t", "").split(":", 1) for line in lines if ":" in line)
    flags = fields.get("flags", "").split()
    has = [name for name, flag in (("AVX-512 VNNI", "avx512_vnni"), ("BF16", "avx512_bf16")) if flag in flags]
    name = fields.get("model name", "an unnamed processor").strip()
    return f"{name} with {'/'.join(has)}" if has else name
