"""Makes the plan itself, in a child process: the engine's own step is compiled for the target from shapes."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.config import SizedConfig
from jpaged.engine.memory_plan import MemoryPlan, compile_largest, plan_memory, resolve_max_model_len, step_programs
from jpaged.execution.device_memory import DeviceMemory, ProgramSize, device_bytes, pool_bytes, program_size
from jpaged.execution.kv_dtype import resolve_kv_dtype
from jpaged.execution.lowering import StepPrograms
from jpaged.loading.build_context import build_context, layers_are_stacked
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.weights import GGUFWeights
from jpaged.loading.hugging_face import transformers
from jpaged.loading.mxfp4 import MXFP4Names
from jpaged.loading.open_checkpoint import is_quantised
from jpaged.loading.parameters.forms import check_device
from jpaged.loading.parameters.targets import abstract_model
from jpaged.loading.parameters.weights import abstract_params
from jpaged.loading.stored_blocks import StoredBlocks
from jpaged.memory.layout import PoolLayout
from jpaged.planning.devices import Device, find_device
from jpaged.planning.estimate import estimate_largest
from jpaged.planning.machine import gemm_flops, read_bandwidth
from jpaged.planning.roofline import Speed, decode_seconds, prefill_seconds
from jpaged.planning.target_mesh import target_mesh
from jpaged.planning.work import step_work
from pallas_kernels.gpu_launch import compiling_for
from pallas_kernels.platform import Impl, resolve_impl, why_no_triton

_COMPILERS = {"cpu": ("jaxlib",), "tpu": ("libtpu",), "cuda": ("jax-cuda13-pjrt", "jax-cuda12-pjrt")}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `jpaged.planning.Plan` for the request that `jpaged.planning.planner` made, or
    ``refused``."""
    device = find_device(request["device"])
    if device.chip.cuda is None:
        return _answer(request, device)
    major, minor = device.chip.cuda.capability
    with compiling_for(10 * major + minor):
        return _answer(request, device)


def _answer(request: dict[str, Any], device: Device) -> dict[str, Any]:
    config = SizedConfig(**request["engine"])
    module, _, name = request["family"].partition(":")
    family = getattr(import_module(module), name)
    model_config = transformers().AutoConfig.from_pretrained(Path(request["config_folder"]))
    kind, dtype, compiled = device.chip.kind, jnp.dtype(request["dtype"]), request["compiled"]
    mesh = target_mesh(device, compiled)
    kernels = _kernels(device)
    try:
        build = build_context(
            mesh,
            dtype,
            expert_parallel=config.enable_expert_parallel,
            # Without the target's compiler the mesh is one of CPUs.
            stacked=layers_are_stacked(kind, kernels),
            kernel_impl=kernels,
        )
        model = abstract_model(family, model_config, build)
        reader: StoredBlocks | None = None
        if request["gguf"]:
            reader = GGUFWeights(GGUFFile(request["gguf"]))
        elif is_quantised(model_config):
            reader = MXFP4Names(name for source in model.weights() for name in source.sources)
        params = abstract_params(model, mesh, quantization=config.quantization, reader=reader)
    except ValueError as error:
        return {"refused": str(error)}
    weights = device_bytes(params)
    memory = DeviceMemory(request["limit"], 0 if kind == "cpu" else weights, is_host=kind == "cpu")
    found: dict[str, Any] = {"weight_bytes": weights, "compiler": _compiler(kind, kernels) if compiled else ""}
    graphdef, context = nnx.split(model)[0], resolve_max_model_len(config.max_model_len, model_config)
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
            dtype=resolve_kv_dtype(config.kv_cache_dtype, dtype, mesh, config.block_size),
            memory=memory,
            kernel_impl=kernels,
            measure=measure,
        )
    except ValueError as error:
        return found | {"problem": str(error)}
    programs = step_programs(
        config, model, graphdef, params, plan.spec, mesh, max_model_len=context, kernel_impl=kernels
    )
    speed = Speed(device.chip.bandwidth, device.chip.flops, device.chip.link)
    if kind == "cpu":
        speed = Speed(read_bandwidth(seconds=0.4), gemm_flops(seconds=0.4), 0.0)
    work = step_work(model, model_config, params, plan.spec, mesh)
    sequences = _sequences(plan.spec.layout, config, context, plan.spec.layout.pool_bytes)
    found |= {
        "temporary_bytes": plan.temporary_bytes,
        "pool_bytes": plan.spec.layout.pool_bytes,
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


def _sequences(layout: PoolLayout, config: SizedConfig, context: int, pool: int) -> int:
    """Return how many sequences of `context` tokens a pool of so many bytes holds at once, above its watermark."""
    one = 0
    for group in layout.groups:
        policy, size = group.spec.policy.for_prefix(0, 0), group.spec.block_size
        one += policy.peak_blocks(context, config.max_num_batched_tokens, size) * group.block_bytes
    return int(pool * (1 - config.watermark)) // one


def _room(plan: MemoryPlan, config: SizedConfig, context: int) -> int:
    """Return how many sequences would fit if the pool took all memory that it could have."""
    most = pool_bytes(
        plan.memory,
        requested=config.kv_cache_memory_bytes,
        memory_utilization=config.memory_utilization,
        temporary_bytes=plan.temporary_bytes,
        useful_bytes=1 << 62,
        sequence_bytes=plan.spec.layout.pool_bytes,
    )
    return _sequences(plan.spec.layout, config, context, most)


def _kernels(device: Device) -> Impl:
    """Return the kernels that an engine takes on the device, if it has there what this environment has."""
    if device.chip.cuda is None:
        return "tpu" if device.chip.kind == "tpu" else resolve_impl(None)
    major, minor = device.chip.cuda.capability
    return "gpu" if why_no_triton(f"{major}.{minor}") is None else "xla"


def _compiler(kind: str, kernels: Impl) -> str:
    """Return the compiler's package and jax with their versions, and the kernels, see `Impl`."""
    packages = [f"{name} {_version(name)}" for name in _COMPILERS[kind] if _version(name)]
    return ", ".join([*packages, f"jax {jax.__version__}", f"kernels {kernels!r}"])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
