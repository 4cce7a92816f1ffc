"""Saves and loads the state of one engine; `LLM` and `AsyncLLM` have a keeper each."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jpaged.claims import writing
from jpaged.config import EngineConfig
from jpaged.engine.engine import Engine
from jpaged.engine.saved_state.capture import Capture, capture
from jpaged.engine.saved_state.folder import StateFiles, newest, read_about, read_state, write_state
from jpaged.engine.saved_state.identity import model_difference, model_facts, pool_difference, pool_facts
from jpaged.engine.saved_state.incremental import LastSave
from jpaged.engine.saved_state.load import check_fresh, load
from jpaged.engine.saved_state.prefix import KIND as PREFIX
from jpaged.engine.saved_state.prefix import NOT_OF_BLOCKS, capture_prefix, load_prefix
from jpaged.errors import EngineStopped, StateRefused
from jpaged.execution.mesh import is_local
from jpaged.image_sources import ImageSources
from jpaged.outputs import SavedPrefix, SavedState
from jpaged.pyramid_kv import PyramidKV
from jpaged.reasoning_config import ReasoningConfig
from jpaged.scheduling import Request
from jpaged.speculative import WAYS
from jpaged.text.input_processor import InputProcessor

logger = logging.getLogger("jpaged.engine")

T = TypeVar("T")
_KINDS: tuple[type[Any], ...] = (PyramidKV, *WAYS, ImageSources, ReasoningConfig)
_SETTINGS = {kind.__name__: kind for kind in _KINDS}
"""Classes of settings that are dataclasses, by the name under which they are saved."""


class StateKeeper:
    """Saves and loads the state of an engine, one at a time.

    Args:
        model_config: the model's configuration from its checkpoint.
        inputs: the processor that made the engine's requests.
        between_steps: calls a function between two steps of the engine and returns its result.
    """

    def __init__(
        self,
        engine: Engine,
        config: EngineConfig,
        model_config: Any,
        inputs: InputProcessor,
        between_steps: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._engine = engine
        self._config = config
        self._model_config = model_config
        self._inputs = inputs
        self._between_steps = between_steps
        self._lock = threading.RLock()  # guards the folder, and the next four
        self._busy = False
        self._facts: tuple[int, dict[str, Any]] | None = None
        self._prepared = False
        self._written: tuple[int, LastSave] | None = None  # with the number of weight updates before it

    def save(self, folder: str | Path) -> SavedState:
        """Write the state as it is between two steps; see `LLM.save_state`.

        Raises:
            RuntimeError: this thread is already in the middle of a save or load, the devices'
                memory was released, or they belong to several processes.
            OSError: writing fails, or another process has claimed the folder; the previous save stays.
        """
        start = time.perf_counter()
        with self._alone(), writing(Path(folder)):
            self._engine.check_memory("save_state()")
            if not self._prepared:
                self._engine.runner.worker.blocks.prepare()
                self._prepared = True
            updates, about, captured, arrays = self._of_one_model(Path(folder))
            num_bytes = write_state(Path(folder), about, captured.host, arrays)
            path = newest(Path(folder))
            self._written = updates, LastSave.of(path, captured.host)
            seconds = time.perf_counter() - start
            saved = SavedState(str(path), captured.num_requests, num_bytes, captured.pause_seconds, seconds)
        logger.info(
            "saved %d requests in %s: %s bytes; the engine paused for %.1f ms of %.2f s",
            saved.num_requests,
            saved.path,
            f"{num_bytes:,}",
            1e3 * saved.pause_seconds,
            seconds,
        )
        return saved

    def load(self, folder: str | Path) -> list[Request]:
        """Load a state into the engine, which must be fresh, and return the state's requests.

        Raises:
            StateRefused: there is no state, or it is damaged or of another model or format; the engine is unchanged.
            RuntimeError: the engine is not fresh, or its devices belong to several processes.
        """
        start = time.perf_counter()
        with self._alone():
            self._engine.check_memory("load_state()")
            check_fresh(self._engine)
            files = read_state(Path(folder))
            if "kind" in files.about:
                raise StateRefused(f"{files.path} holds a {files.about['kind']}, no state: load_prefix() takes it up")
            _, about = self._about()
            difference = model_difference(files.about["model"], about["model"], self._model_config)
            if difference is not None:
                raise StateRefused(f"{files.path} cannot be taken up: {difference}")
            differing = pool_difference(files.about["pool"], about["pool"], type(self._config))
            shared = self._engine.replicas[0].memory.shared
            differing += [f"{kind} in the pool" for kind, blocks in shared.items() if not blocks.policy.is_saved]
            requests = self._between_steps(lambda: self._take_up(files, differing))
        logger.info(
            "%d %s on from %s after %.2f s%s",
            len(requests),
            "request goes" if len(requests) == 1 else "requests go",
            files.path,
            time.perf_counter() - start,
            f"; all is computed again, as {', '.join(differing)} differ" if differing else "",
        )
        return requests

    def save_prefix(self, folder: str | Path, seq_id: int) -> SavedPrefix:
        """Write a pinned prefix; see `LLM.save_prefix`.

        Raises:
            ValueError, RuntimeError: see `capture_prefix`; RuntimeError also where the weights are replaced meanwhile.
            OSError: writing fails; what the folder held stays.
        """
        with self._alone(), writing(Path(folder)):
            self._engine.check_memory("save_prefix()")
            updates, about = self._about()
            model = self._engine.runner.worker.model
            then, captured = self._between_steps(lambda: (model.num_updates, capture_prefix(self._engine, seq_id)))
            if then != updates:
                raise RuntimeError("the weights were replaced while the prefix was saved: save it again")
            about = {"kind": PREFIX, **{name: about[name] for name in ("jpaged", "model", "pool")}}
            num_bytes = write_state(Path(folder), about, captured.host, captured.arrays())
            return SavedPrefix(str(newest(Path(folder))), len(captured.host["tokens"]), num_bytes)

    def load_prefix(self, folder: str | Path, cache_salt: str | None) -> int:
        """Load a prefix into the pools and return how many tokens it has; see `LLM.load_prefix`.

        Raises:
            StateRefused: there is none, or it is damaged, of other weights, or of a pool whose blocks mean something
                else. The engine is unchanged.
            ValueError, RuntimeError: see `load_prefix`.
        """
        with self._alone():
            self._engine.check_memory("load_prefix()")
            files = read_state(Path(folder))
            if files.about.get("kind") != PREFIX:
                raise StateRefused(f"{files.path} holds a saved state, not a prefix: load_state() takes it up")
            updates, about = self._about()
            difference = model_difference(files.about["model"], about["model"], self._model_config)
            if difference is not None:
                raise StateRefused(f"{files.path} cannot be loaded: {difference}")
            facts = pool_difference(files.about["pool"], about["pool"], type(self._config))
            if differing := [fact for fact in facts if fact not in NOT_OF_BLOCKS]:
                raise StateRefused(
                    f"{files.path} cannot be loaded: its blocks mean something else here, as {', '.join(differing)} "
                    "differ; save_prefix() with this engine's settings"
                )
            salt = files.host["cache_salt"] if cache_salt is None else cache_salt
            model, seq_id = self._engine.runner.worker.model, self._inputs.new_seq_id()

            def put() -> int:
                if model.num_updates != updates:
                    raise RuntimeError("the weights were replaced while the prefix was loaded: load it again")
                return load_prefix(self._engine, seq_id, files.host, files.array, salt)

            return self._between_steps(put)

    def _of_one_model(self, folder: Path) -> tuple[int, dict[str, Any], Capture, dict[str, np.ndarray]]:
        """Return the number of weight updates, the description of the weights, and the state computed with them.

        If the weights are replaced while they are summed up, all of it is done again.
        """
        while True:
            updates, about = self._about()
            before, self._written = self._before(folder), None
            updates_then, captured, arrays = self._capture(before)
            if updates_then == updates:
                return updates, about, captured, arrays

    def _capture(self, before: LastSave | None) -> tuple[int, Capture, dict[str, np.ndarray]]:
        model = self._engine.runner.worker.model
        updates, captured = self._between_steps(
            lambda: (model.num_updates, capture(self._engine, self._inputs, before))
        )
        try:
            return updates, captured, captured.arrays()
        except (OSError, ValueError) as error:
            if before is None:
                raise
            logger.warning("the save before cannot be read, so all blocks are copied: %s", error)
            return self._capture(None)

    def _before(self, folder: Path) -> LastSave | None:
        """Return the blocks of the previous save if it is in the same folder and of the same weights, else None."""
        if self._written is None:
            return None
        updates, written = self._written
        same = updates == self._engine.runner.worker.model.num_updates
        return written if same and written.path is not None and written.path.parent == folder.absolute() else None

    def _take_up(self, files: StateFiles, differing: list[str]) -> list[Request]:
        try:
            return load(self._engine, self._inputs, files.host, files.array, same_blocks=not differing)
        except (KeyError, TypeError, ValueError) as error:
            raise StateRefused(f"{files.path} cannot be taken up: {error!r}") from error

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one thread at a time save or load, and refuse a signal's handler that asks in the middle of either."""
        if not is_local(self._engine.runner.mesh):
            raise RuntimeError("a state cannot be saved or loaded where the devices belong to several processes")
        with self._lock:
            if self._busy:
                raise RuntimeError("a save or load is refused in the middle of another one")
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    def _about(self) -> tuple[int, dict[str, Any]]:
        """Return the number of weight updates, and a save's description of its model and pool.

        The weights must be on the devices. They are summed up once, until they are replaced.
        """
        runner, updates = self._engine.runner, self._engine.runner.worker.model.num_updates
        if self._facts is None or self._facts[0] != updates:
            self._facts = (
                updates,
                model_facts(self._config, self._model_config, runner.worker.model.params, runner.mesh),
            )
        model = self._facts[1]
        about = {
            "jpaged": version("jpaged"),
            "model": model,
            "pool": pool_facts(self._config, model, runner.spec),
            "settings": settings_data(self._config),
        }
        return updates, about


def settings_data(config: EngineConfig) -> dict[str, Any]:
    """Return an engine's settings as plain data; a dataclass becomes its name and fields."""
    data = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, value in data.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            data[name] = [type(value).__name__, dataclasses.asdict(value)]
        if isinstance(value, ImageSources):
            data[name][1]["folders"] = [str(folder) for folder in value.folders]
    return data


def saved_settings(folder: str | Path) -> dict[str, Any]:
    """Return the settings of the engine whose state a folder holds.

    Raises:
        StateRefused: there is no state, or its description is damaged or of another format.
    """
    return settings_of(read_about(newest(Path(folder)))["settings"])


def settings_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that `settings_data` turned into plain data."""
    return {name: _setting_of(value) for name, value in data.items()}


def _setting_of(value: Any) -> Any:
    match value:
        case [str(kind), dict(fields)]:  # two texts are the answers of a reranker
            return _SETTINGS[kind](**fields)
    return value


class PeriodicSaver:
    """Saves at an interval, if something has changed since the last save, until it is stopped.

    A failed save is logged, and the next one tries again; a disk that stays full is logged once.

    Args:
        save: saves the state.
        moment: returns a value that changes once the engine has done anything.
        seconds: from the end of one save to the beginning of the next.

    Attributes:
        last: the last save; None before the first.
    """

    def __init__(self, save: Callable[[], SavedState], moment: Callable[[], Any], seconds: float) -> None:
        self.last: SavedState | None = None
        self._save = save
        self._moment = moment
        self._seconds = seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jpaged-saver", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop saving, and wait for a save that is being written."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        saved: Any = None
        failure = ""
        while not self._stopped.wait(self._seconds):
            moment = self._moment()
            if moment == saved:
                continue
            try:
                self.last = self._save()
                saved, failure = moment, ""
            except EngineStopped:
                return
            except OSError as error:
                if str(error) != failure:
                    logger.error("the state could not be saved; the next save tries again: %s", error)
                failure = str(error)
            except Exception:
                logger.exception("the state could not be saved; the next save tries again")
