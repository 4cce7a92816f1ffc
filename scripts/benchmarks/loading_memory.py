"""Measures the host memory that loading a model takes at its peak, next to what stays."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import numba  # noqa: F401  # its import is no part of loading

from jpaged.loading import load_model
from jpaged.loading.open_checkpoint import open_model
from jpaged.loading.weight_formats.stored_codes import CodedReader
from jpaged.model_api import Bfloat16Tiles
from scripts.cases import Rows


def loading_memory(model: Path, first: Path | None = None, quantization: str | None = None) -> Rows:
    """Peak of resident memory while a model is loaded, above that of the process after its imports (Linux).

    The aim is at most 1.2 times the file or what is held, whichever is more, and the largest plain tensor.
    --first is loaded before: a small model of the same format, so that what its load imports and compiles is no part.
    --quantization is the engine's setting.
    """
    jax.block_until_ready(jax.numpy.zeros(8))
    if first is not None:
        load_model(first, quantization=quantization, compact_tiles=Bfloat16Tiles.FLOAT32_PRODUCT)
    reader = open_model(model).reader
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    loaded = load_model(model, quantization=quantization, compact_tiles=Bfloat16Tiles.FLOAT32_PRODUCT)
    jax.block_until_ready(loaded.params)
    peak = _status("VmHWM") - before
    files = sum(file.stat().st_size for file in model.glob("*.safetensors")) if model.is_dir() else model.stat().st_size
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
    plain = [name for name in reader.names() if not (isinstance(reader, CodedReader) and reader.encodings(name))]
    largest = max((math.prod(reader.shape(name)) * reader.dtype(name).itemsize for name in plain), default=0)
    aim = 1.2 * max(files, held) + largest
    figures = {"file": files, "held": held, "largest": largest, "peak": peak, "aim": aim}
    return [{"model": model.name} | {f"{name} MiB": round(number / 2**20, 1) for name, number in figures.items()}]


def _status(name: str) -> int:
    """Return a number of bytes of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
