"""Makes the plan itself, in a child process: the engine's own step is compiled for the target from shapes."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from jpaged.config import SizedConfig
from jpaged.engine.memory_plan import MemoryPlan, compile_largest, plan_memory, step_programs
from jpaged.execution.device_memory import DeviceMemory, ProgramSize, pool_bytes, program_size
from jpaged.execution.kv_dtype import resolve_kv_dtype
from jpaged.execution.lowering import StepPrograms
from jpaged.loading.parameters.formats import check_device
from jpaged.memory.layout import PoolLayout
from jpaged.planning.abstract_engine import abstract_engine
from jpaged.planning.devices import Device, find_device
from jpaged.planning.estimate import estimate_largest
from jpaged.planning.machine import gemm_flops, read_bandwidth
from jpaged.planning.roofline import Speed, decode_seconds, prefill_seconds, step_work
from jpaged.planning.room import sequences_at_once
from jpaged.planning.target_mesh import target_capability
from pallas_kernels.platform import Impl

_COMPILERS = {"cpu": ("jaxlib",), "tpu": ("libtpu",), "cuda": ("jax-cuda13-pjrt", "jax-cuda12-pjrt")}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `jpaged.planning.Plan` for the request that `jpaged.planning.planner` made, or
    ``refused``."""
    device = find_device(request["device"])
    with target_capability(device):
        return _answer(request, device)


def _answer(request: dict[str, Any], device: Device) -> dict[str, Any]:
    kind, compiled = device.chip.kind, request["compiled"]
    try:
        engine = abstract_engine(request, device)
    except ValueError as error:
        return {"refused": str(error)}
    config, model, graphdef, params, mesh = engine.config, engine.model, engine.graphdef, engine.params, engine.mesh
    kernels, context, weights = engine.kernels, engine.max_model_len, engine.weight_bytes
    memory = DeviceMemory(request["limit"], 0 if kind == "cpu" else weights, is_host=kind == "cpu")
    found: dict[str, Any] = {"weight_bytes": weights, "compiler": _compiler(kind, kernels) if compiled else ""}
    try:
        check_device(config.quantization, mesh.devices.flat[0])
        if kind == "cpu" and weights > request["limit"]:
            raise ValueError(f"weights of {weights:,} bytes are more than the {request['limit']:,} bytes free")
        measure = compile_largest if compiled else estimate_largest
        plan = plan_memory(
            config,
            model,
            graphdef,
            params,
            mesh,
            max_model_len=context,
            dtype=resolve_kv_dtype(config.kv_cache_dtype, engine.dtype, mesh, config.block_size),
            adapters=engine.adapters,
            memory=memory,
            rows=engine.image_rows,
            kernel_impl=kernels,
            measure=measure,
        )
    except ValueError as error:
        return found | {"problem": str(error)}
    programs = step_programs(
        config,
        model,
        graphdef,
        params,
        plan.spec,
        mesh,
        max_model_len=context,
        rows=engine.image_rows,
        kernel_impl=kernels,
    )
    speed = Speed(device.chip.bandwidth, device.chip.flops, device.chip.link)
    if kind == "cpu":
        speed = Speed(read_bandwidth(seconds=0.4), gemm_flops(seconds=0.4), 0.0)
    work = step_work(model, engine.model_config, params, plan.spec, mesh)
    sequences = sequences_at_once(
        plan.spec.layout, context, config.max_num_batched_tokens, plan.spec.layout.pool_bytes, config.watermark
    )
    found |= {
        "temporary_bytes": plan.temporary_bytes,
        "adapter_bytes": plan.adapter_bytes,
        "pool_bytes": plan.spec.layout.pool_bytes,
        "page_bytes": plan.spec.layout.page_bytes,
        "tower_bytes": engine.tower_bytes,
        "row_lengths": engine.image_rows.lengths if engine.image_rows else (),
        "groups": _groups(plan.spec.layout),
        "sequences": min(sequences, config.max_num_seqs),
        "room": max(sequences, _room(plan, config, context)),
        "programs": [asdict(size) for size in _sizes(plan, programs, compiled)],
        "bandwidth": speed.bandwidth,
        "flops": speed.flops,
    }
    running = min(sequences, config.max_num_seqs)
    if running == 0:
        return found | {"problem": f"the pool does not hold one sequence of {context:,} tokens"}
    tokens, most = config.max_num_batched_tokens, config.max_num_seqs
    found["decode_tokens_per_s"] = most / decode_seconds(work, speed, most, 0)
    found["full_decode_tokens_per_s"] = running / decode_seconds(work, speed, running, context)
    found["prefill_tokens_per_s"] = tokens / prefill_seconds(work, speed, tokens, 0)
    return found


def _sizes(plan: MemoryPlan, programs: StepPrograms, compiled: bool) -> tuple[ProgramSize, ...]:
    """Return the sizes of the decode step with the very pool, and of the programs that the pool's size was found by."""
    if not compiled:
        return plan.programs
    return (program_size("decode step", programs.decode()), *(plan.programs or compile_largest(programs)))


def _groups(layout: PoolLayout) -> list[dict[str, Any]]:
    return [
        {
            "name": group.spec.name,
            "num_blocks": group.num_blocks,
            "block_bytes": group.block_bytes,
            "block_size": group.spec.block_size,
        }
        for group in layout.groups
    ]


def _room(plan: MemoryPlan, config: SizedConfig, context: int) -> int:
    """Return how many sequences would fit if the pool took all memory that it could have."""
    most = pool_bytes(
        plan.memory,
        requested=config.kv_cache_memory_bytes,
        memory_utilization=config.memory_utilization,
        temporary_bytes=plan.temporary_bytes,
        adapter_bytes=plan.adapter_bytes,
        useful_bytes=1 << 62,
        sequence_bytes=plan.spec.layout.pool_bytes,
    )
    return sequences_at_once(plan.spec.layout, context, config.max_num_batched_tokens, most, config.watermark)


def _compiler(kind: str, kernels: Impl) -> str:
    """Return the compiler's package and jax with their versions, and the kernels, see `Impl`."""
    packages = [f"{name} {_version(name)}" for name in _COMPILERS[kind] if _version(name)]
    return ", ".join([*packages, f"jax {jax.__version__}", f"kernels {kernels!r}"])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
