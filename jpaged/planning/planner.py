"""Asks a process that has the compiler, and puts its answer together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jpaged.config import EngineConfig
from jpaged.engine.compute_dtype import check_compute_dtype
from jpaged.engine.default_sizes import sized
from jpaged.engine.memory_plan import resolve_max_model_len
from jpaged.execution.device_memory import ProgramSize, host_memory_available
from jpaged.loading.describe import Described, describe_model
from jpaged.loading.load import check_dtype, runtime_dtype
from jpaged.planning.compilers import compiler_python
from jpaged.planning.devices import Device, find_device
from jpaged.planning.result import GroupPlan, Plan
from jpaged.planning.target_mesh import environment

SHAPES = Path(__file__).parent / "shapes"
"""Configs of published models, for those that a hub gives only to who has signed in."""


def _described(name: str) -> Described:
    """Describe a published shape, or any model that has a config."""
    published = SHAPES / f"{name}.json"
    try:
        return describe_model(published if published.exists() else name)
    except ValueError as error:
        raise ValueError(f"{error}; published shapes are {', '.join(published_shapes())}") from error


def published_shapes() -> list[str]:
    """Return the names of the models whose configs come with jpaged."""
    return sorted(file.stem for file in SHAPES.glob("*.json"))


def plan(
    model: str,
    device: str,
    *,
    context: int = 8192,
    concurrency: int | None = None,
    max_num_batched_tokens: int | None = None,
    memory_bytes: int | None = None,
    compiler_env: str | Path | None = None,
    **settings: Any,
) -> Plan:
    """Return what `jpaged.LLM` would take of a device, and how fast it could be.

    >>> print(plan("llama-3.1-8b", "v5e-8"))                                 # doctest: +SKIP

    Args:
        model: hub id, folder, config.json, ``.gguf`` file, ``smollm2-135m``, or a published shape: a name in `SHAPES`.
        device: a name in `DEVICES`.
        context: most tokens of a sequence, as max_model_len.
        concurrency: sequences at once, as max_num_seqs; by default what the engine would choose for the device.
        max_num_batched_tokens: tokens of a step; by default what the engine would choose.
        memory_bytes: bytes that programs may take of each device; by default the table's, on a CPU what is free now.
        compiler_env: a virtual environment with the compiler, see `compiler_python`.
        settings: any other setting of `EngineConfig`, such as dtype or block_size.

    Raises:
        ValueError: an unknown device or model, a setting out of its range, or a model that is not implemented.
        RuntimeError: the compiler failed for another reason than memory.
    """
    target = find_device(device)
    if memory_bytes is not None and memory_bytes < 1:
        raise ValueError(f"memory_bytes={memory_bytes} must be positive")
    if "tensor_parallel_size" in settings:
        raise ValueError(f"tensor_parallel_size={settings['tensor_parallel_size']!r}: the device's name says how many")
    name = str(model)
    asked = EngineConfig(
        model=name,
        max_model_len=context,
        max_num_seqs=concurrency,
        max_num_batched_tokens=max_num_batched_tokens,
        tensor_parallel_size=target.count,
        **settings,
    )
    kind = target.chip.kind
    config = sized(asked, "gpu" if kind == "cuda" else kind, memory_bytes or target.chip.limit)
    described = _described(name)
    resolve_max_model_len(context, described.config)
    limit = memory_bytes or target.chip.limit or host_memory_available()
    check_dtype(config.dtype, kind)
    check_compute_dtype(config.dtype, kind, target.count)
    dtype = runtime_dtype(described.stored, kind == "cpu") if config.dtype == "auto" else config.dtype
    python = compiler_python(kind, compiler_env)
    found = _ask(python, target, described, {"engine": asdict(config), "dtype": dtype, "limit": limit})
    if "refused" in found:
        raise ValueError(found["refused"])
    found["groups"] = tuple(GroupPlan(**group) for group in found.get("groups", ()))
    found["programs"] = tuple(ProgramSize(**size) for size in found.get("programs", ()))
    return Plan(config=config, device=target, dtype=dtype, limit_bytes=limit, **found)


def _ask(python: Path | None, device: Device, described: Described, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a child process that has the compiler, or of one without if `python` is None."""
    family = described.family
    packages = ("jpaged", "pallas_kernels", "jpaged_models", family.__module__.partition(".")[0])
    request |= {
        "device": device.name,
        "family": f"{family.__module__}:{family.__qualname__}",
        "packages": {name: _origin(name) for name in packages},
        "compiled": python is not None,
        "gguf": described.gguf and str(described.gguf.absolute()),
    }
    with tempfile.TemporaryDirectory() as folder:
        described.config.to_json_file(Path(folder) / "config.json", use_diff=False)
        # -P: the script's folder is no place to import from.
        done = subprocess.run(
            [python or sys.executable, "-P", Path(__file__).parent / "child.py"],
            input=json.dumps(request | {"config_folder": folder}),
            capture_output=True,
            text=True,
            env=os.environ | environment(device, compiled=python is not None),
        )
    if done.returncode:
        raise RuntimeError(f"compiling for {device.name} with {python} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _origin(package: str) -> str:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, package
    return spec.origin
