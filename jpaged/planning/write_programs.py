"""Compiles all programs of an engine for a device, from shapes, and writes them; run in a child process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jpaged.engine.builder import tokens_together, why_no_images
from jpaged.engine.memory_plan import plan_memory
from jpaged.engine.program_folder import engine_facts
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.compile.cache import compiled_anew
from jpaged.execution.compile.program import Compilations
from jpaged.execution.compile.store import ProgramStore
from jpaged.execution.device_memory import DeviceMemory
from jpaged.execution.image_rows import image_examples
from jpaged.execution.kv_dtype import resolve_kv_dtype
from jpaged.execution.programs import ModelPrograms
from jpaged.execution.sampling.pair_tables import PairTables
from jpaged.execution.shapes import Shapes, compiled_in_threads
from jpaged.execution.step_settings import StepSettings
from jpaged.execution.work.base import WorkContext
from jpaged.execution.work.registry import pool_works
from jpaged.loading.parameters.formats import check_device
from jpaged.planning.abstract_engine import AbstractEngine, abstract_engine
from jpaged.planning.devices import find_device
from jpaged.planning.target_mesh import target_capability


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Compile the programs of the engine that a request of `jpaged.planning.programs_for` describes into its folder;
    returns how many there are and their bytes, or ``refused``."""
    device = find_device(request["device"])
    with target_capability(device), compiled_anew():
        try:
            engine = abstract_engine(request, device)
            check_device(engine.config.quantization, engine.mesh.devices.flat[0])
            spec = _pool(engine, request["limit"])
        except ValueError as error:
            return {"refused": str(error)}
        facts = engine_facts(
            engine.config,
            family=engine.family,
            model=request["model"],
            dtype=engine.dtype,
            mesh=engine.mesh,
            spec=spec,
            max_model_len=engine.max_model_len,
            params=engine.params,
        )
        store = ProgramStore(Path(request["folder"]), engine.mesh, facts)
        number = sum(1 for _ in compiled_in_threads(_shapes(engine, spec, store).all()))
        return {"programs": number, "bytes": store.write()}


def _pool(engine: AbstractEngine, limit: int) -> PoolSpec:
    config = engine.config
    return plan_memory(
        config,
        engine.model,
        engine.graphdef,
        engine.params,
        engine.mesh,
        max_model_len=engine.max_model_len,
        dtype=resolve_kv_dtype(config.kv_cache_dtype, engine.dtype, engine.mesh, config.block_size),
        adapters=engine.adapters,
        memory=DeviceMemory(limit, engine.weight_bytes),
        rows=engine.image_rows,
        kernel_impl=engine.kernels,
    ).spec


def _shapes(engine: AbstractEngine, spec: PoolSpec, store: ProgramStore) -> Shapes:
    config, model, mesh, compilations = engine.config, engine.model, engine.mesh, Compilations()
    on_compile = compilations.begin, compilations.end
    settings = StepSettings(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=engine.max_model_len,
        vocab_size=model.vocab_size,
        deterministic=config.deterministic,
        images=why_no_images(config, model, several_processes=False) is None,
        together=tokens_together(model, engine.image_rows, config.max_num_batched_tokens),
        image_rows=engine.image_rows,
        adapters=engine.adapters is not None,
        scored=config.cumulative_logprobs,
    )
    programs = ModelPrograms(
        engine.graphdef,
        engine.params,
        spec,
        mesh,
        *on_compile,
        store=store,
        kernel_impl=engine.kernels,
        scored=settings.scores_draws,
        alone=settings.alone,
    )
    context = WorkContext(
        spec=spec,
        mesh=mesh,
        settings=settings,
        model=programs,
        on_compile=on_compile,
        store=store,
        can_swap=config.moves_blocks,
        examples=image_examples(model, settings.image_rows) if settings.images else (),
        kernel_impl=engine.kernels,
    )
    return Shapes(
        model=programs,
        works=tuple(pool_works(context).values()),
        buckets=settings.buckets(spec),
        spec=spec,
        mesh=mesh,
        settings=settings,
        tables=PairTables(mesh, settings.vocab_size, *on_compile, store=store),
    )
