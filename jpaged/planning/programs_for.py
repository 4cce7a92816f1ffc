"""Compiles an engine's programs for a device that may not be here, into a folder that an engine there reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jpaged.config import EngineConfig
from jpaged.engine.program_folder import configuration_digest
from jpaged.execution.compile.store import free_folder
from jpaged.planning.child_process import Question, compiler_python
from jpaged.planning.devices import find_device
from jpaged.setting import refuse
from jpaged.validation import integer, whole


def compile_programs_for(
    model: str | Path,
    device: str,
    folder: str | Path,
    *,
    memory_bytes: int | None = None,
    compiler_env: str | Path | None = None,
    **settings: Any,
) -> tuple[int, int]:
    """Compile all programs of an engine for a device into a folder; ``LLM(model, compiled_programs=folder)`` with the
    same settings, versions and code on such devices then neither traces nor compiles them.

    Weights are not read; with enable_lora the shapes of the checkpoint's tensors are. The pool is sized as `plan` sizes
    it, and the engine takes its size from the folder.

    Args:
        model: as for `plan`.
        device: a name in `DEVICES` except "cpu", whose programs would be for this machine's processor.
        folder: made, or written anew if it holds such programs.
        memory_bytes: bytes that programs may take of each device; None = the value in the table of devices.
        compiler_env: a virtual environment with the compiler, see `compiler_python`. Its versions are those that the
            device's engine has to have.
        settings: as for `jpaged.LLM`; the device's name says tensor_parallel_size.

    Returns:
        Number of programs, and bytes of their files.

    Raises:
        ValueError: an unknown device or model, a setting that is refused, no compiler, or a model that does not fit.
        FileExistsError: the folder holds something else.
        OSError: the folder cannot be written.
        RuntimeError: the compiler failed.
    """
    target = find_device(device)
    kind = target.chip.kind
    if kind == "cpu":
        raise ValueError("device='cpu': programs of a CPU are of its processor; leave device out on such a machine")
    if settings.get("tensor_parallel_size", 1) != 1:
        raise ValueError(f"tensor_parallel_size={settings['tensor_parallel_size']!r}: the device's name says how many")
    if memory_bytes is not None:
        memory_bytes = integer("memory_bytes", whole(memory_bytes), low=1)
    asked = EngineConfig(**{"model": str(model), **settings, "tensor_parallel_size": target.count})
    refuse(
        asked, "programs for absent devices", "must be left out, as programs for another device are compiled without"
    )
    python = compiler_python(kind, compiler_env)
    if python is None:
        raise ValueError(f"device={device!r} needs its compiler, here or where `scripts/aot_env.sh {kind} DIR` puts it")
    folder = free_folder(folder)
    question = Question.of(asked, target, memory_bytes)
    digest = configuration_digest(question.described.config)
    found = question.ask(python, "programs", folder=str(folder), model=digest)
    return found["programs"], found["bytes"]
