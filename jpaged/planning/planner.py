"""Asks a process that has the compiler, and puts its answer together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jpaged.config import EngineConfig
from jpaged.execution.device_memory import ProgramSize
from jpaged.planning.child_process import Question, compiler_python
from jpaged.planning.devices import find_device
from jpaged.planning.result import GroupPlan, Plan
from jpaged.setting import refuse
from jpaged.validation import integer, whole


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
    """Return the memory that `jpaged.LLM` would take of a device, and the speed that it could reach.

    >>> print(plan("llama-3.1-8b", "v5e-8"))                                 # doctest: +SKIP

    Args:
        model: hub id, folder, config.json, ``.gguf`` file, ``smollm2-135m``, or a published shape: a name in `SHAPES`.
        device: a name in `DEVICES`.
        context: most tokens of a sequence, as max_model_len.
        concurrency: sequences at once, as max_num_seqs; by default the engine's choice for the device.
        max_num_batched_tokens: tokens of a step; by default the engine's choice.
        memory_bytes: bytes that programs may take of each device; by default the table's, on a CPU the free memory.
        compiler_env: a virtual environment with the compiler, see `compiler_python`.
        settings: any other setting of `EngineConfig`, such as dtype or block_size, that plans do not refuse.

    Raises:
        ValueError: an unknown device or model, a setting that is refused or out of its range, or a model that is not
            implemented.
        RuntimeError: the compiler failed for another reason than memory.
    """
    target = find_device(device)
    if memory_bytes is not None:
        memory_bytes = integer("memory_bytes", whole(memory_bytes), low=1)
    if "tensor_parallel_size" in settings:
        raise ValueError(f"tensor_parallel_size={settings['tensor_parallel_size']!r}: the device's name says how many")
    asked = EngineConfig(
        model=str(model),
        max_model_len=context,
        max_num_seqs=concurrency,
        max_num_batched_tokens=max_num_batched_tokens,
        tensor_parallel_size=target.count,
        **settings,
    )
    refuse(asked, "plans", "must be left out, as plans are made without")
    question = Question.of(asked, target, memory_bytes)
    found = question.ask(compiler_python(target.chip.kind, compiler_env), "plan")
    found["groups"] = tuple(GroupPlan(**group) for group in found.get("groups", ()))
    found["row_lengths"] = tuple(found.get("row_lengths", ()))
    found["programs"] = tuple(ProgramSize(**size) for size in found.get("programs", ()))
    return Plan(config=question.config, device=target, dtype=question.dtype, limit_bytes=question.limit, **found)
