"""Compiles an engine's programs into a folder, from which engines with the same settings load them."""

from __future__ import annotations

from pathlib import Path

from jpaged.config import EngineConfig
from jpaged.engine.builder import build_engine
from jpaged.engine.control import EngineControl
from jpaged.engine.owner import OwnedEngine
from jpaged.engine.program_folder import check_one_model
from jpaged.execution.compile.cache import compiled_anew
from jpaged.execution.compile.store import free_folder


def compile_programs(config: EngineConfig, folder: str | Path, *, use_tqdm: bool = True) -> tuple[int, int]:
    """Compile all shapes of an engine and write them to a folder that `EngineConfig.compiled_programs` takes.

    XLA's cache on disk is not used meanwhile: programs that come from it cannot be written again.

    Returns:
        Number of programs, and bytes of their files.

    Raises:
        ValueError: a setting is bad, nothing would be compiled (enforce_eager), `speculative` has its own model, or
            several processes hold the mesh.
        FileExistsError: the folder holds something else.
        OSError: the folder cannot be written.
    """
    if config.enforce_eager:
        raise ValueError("enforce_eager=True compiles nothing ahead: there is nothing to write")
    if config.compiled_programs is not None:
        raise ValueError(f"compiled_programs={config.compiled_programs!r}: programs are compiled anew, from no folder")
    check_one_model(config)
    folder = free_folder(folder)
    with compiled_anew():
        built = build_engine(config, collect=folder)
        owner = OwnedEngine(built.engine)
        try:
            number = owner.run(EngineControl(built.served, owner).prepare_warmup(use_tqdm=use_tqdm))
            programs = built.engine.runner.worker.programs
            assert programs is not None
            return number, programs.write()
        finally:
            owner.close()
