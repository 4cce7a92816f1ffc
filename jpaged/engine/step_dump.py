"""Writes an engine's steps to files if an environment variable asks for it, and replays a written step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpaged.config import EngineConfig
from jpaged.engine.builder import Built, build_engine
from jpaged.engine.saved_state.identity import model_difference, model_facts
from jpaged.engine.saved_state.keeper import settings_data, settings_of
from jpaged.execution.step_dump import DumpedStep, StepRecorder, refusing_other_structure
from jpaged.execution.step_replay import Replay, replay
from jpaged.setting import Affects, affecting
from jpaged.setting import settings_of as declared

VARIABLE = "JPAGED_DUMP_STEPS"
"""Environment variable: ``FOLDER``, or ``FOLDER:FIRST-LAST`` for some of the steps, counted from 0."""


def record_if_asked(built: Built, environment: Mapping[str, str] = os.environ) -> None:
    """Make a new engine write its steps to the folder that `VARIABLE` names; do nothing if it is not set.

    Raises:
        ValueError: the variable names no range of steps, or the engine has several replicas or processes.
        OSError: the folder cannot be made.
    """
    if not (asked := environment.get(VARIABLE)):
        return
    runner = built.engine.runner

    def facts() -> dict[str, Any]:
        settings = settings_data(built.served.config) | {"max_model_len": runner.settings.max_model_len}
        return {"settings": settings, "model": _model_facts(built)}

    try:
        runner.record_steps(StepRecorder(*_parse(asked), facts))
    except BaseException:
        built.engine.close()
        raise


def _model_facts(built: Built) -> dict[str, Any]:
    runner = built.engine.runner
    return model_facts(built.served.config, built.served.model_config, runner.worker.model.params, runner.mesh)


def _parse(asked: str) -> tuple[Path, range | None]:
    folder, colon, numbers = asked.rpartition(":")
    if not colon or os.sep in numbers:
        return Path(asked), None
    first, dash, last = numbers.partition("-")
    if not (first.isdigit() and (last.isdigit() if dash else True)):
        raise ValueError(f"{VARIABLE}={asked!r} must be FOLDER, FOLDER:STEP or FOLDER:FIRST-LAST")
    return Path(folder), range(int(first), int(last if dash else first) + 1)


def replay_step(path: Path, model: str | None = None, *, top: int = 5) -> Replay:
    """Make an engine with a dumped step's settings and the same pool size, run the step on it and close it.

    Args:
        model: where the model is now; None = where it was.
        top: how many of the most likely tokens to find.

    Raises:
        ValueError: the file is no dump, is damaged or of another version, or the model is another one.
        OSError: the file cannot be read.
    """
    dump = DumpedStep.read(path)
    with refusing_other_structure(path):
        left_out = declared(EngineConfig).keys() - affecting(EngineConfig, Affects.PROGRAMS | Affects.STEPS)
        kept = {name: value for name, value in dump.facts["settings"].items() if name not in left_out}
        settings = settings_of(kept) | {"kv_cache_memory_bytes": dump.facts["pool"]["device_bytes"]}
        if model is not None:
            settings["model"] = model
        config, saved = EngineConfig(**settings), dump.facts["model"]
        saved = {name: saved[name] for name in ("name", "config", "layout", "weights")}
    built = build_engine(config)
    try:
        runner = built.engine.runner
        served = built.served.model_config
        if difference := model_difference(saved, _model_facts(built), served):
            raise ValueError(f"{path} cannot be replayed: {difference}")
        longest, most = dump.inputs.batch.kv_lens.max(), runner.settings.max_model_len
        if longest > most:
            raise ValueError(f"{path} cannot be replayed: kv_lens has {longest}, above max_model_len={most}")
        return replay(runner.worker, dump, top=top)
    finally:
        built.engine.close()
