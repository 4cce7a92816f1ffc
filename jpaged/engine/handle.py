"""Who holds an engine: asks it how it is, lends it out, and frees its memory at the end."""

from __future__ import annotations

import weakref
from typing import Any, Self, cast

from jpaged.engine.engine import Engine
from jpaged.engine.metrics import metrics_of
from jpaged.engine.stats import EngineStats
from jpaged.errors import EngineStopped
from jpaged.metrics import Metric


class EngineHandle:
    """Holds the only reference to an engine that users have; `jpaged.LLM` is one.

    The devices' memory is free again when it is deleted or closed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # An engine is full of circles: without this its memory would wait for the garbage collector.
        self._free = weakref.finalize(self, engine.close)
        self._free.atexit = False

    def stats(self) -> EngineStats:
        """Return what the engine has done and does now; it costs a few microseconds, and any thread may ask."""
        return self._engine.snapshot()

    def get_metrics(self) -> list[Metric]:
        """Return `stats` as metrics with names, as vLLM's `get_metrics` does; the names begin with "jpaged:"."""
        return metrics_of(self.stats())

    def check_health(self) -> None:
        """Do nothing while the engine can be used.

        Raises:
            EngineStopped: it was closed.
        """
        if not self._free.alive:
            raise _closed()

    def close(self) -> None:
        """Free the devices' memory at once: requests are aborted, streams end. Closing again is no error.

        Weights that the caller holds too, from `params` or given to `update_params`, live on.

        Raises:
            RuntimeError: an AsyncLLM has the engine; shut that down first.
        """
        if not self._free.alive:
            return
        if isinstance(self._engine, _Absent):
            raise self._engine.error
        engine, self._engine = self._engine, cast(Engine, _Absent(_closed()))
        engine.refusal = _closed()
        self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------ for AsyncLLM

    def lend_engine(self) -> Engine:
        """Hand the engine to the only thread that may touch it until `take_back`; meanwhile the LLM cannot be used.
        Requests that came with a saved state and that nobody has taken up go with it.

        Raises:
            RuntimeError: requests are running, or the engine is lent already.
        """
        with self._engine.turn:
            if self._engine.is_taken:
                raise RuntimeError("an AsyncLLM cannot take the engine while requests run")
            lent = RuntimeError("the engine is in use by an AsyncLLM; shut that down first")
            engine, self._engine = self._engine, cast(Engine, _Absent(lent))
            engine.refusal = lent
            return engine

    def take_back(self, engine: Engine) -> None:
        """Take the engine back from the `AsyncLLM` that had it."""
        self._engine, engine.refusal = engine, None


def _closed() -> EngineStopped:
    return EngineStopped("this LLM was closed; make a new one to go on")


class _Absent:
    """Stands where the engine was; whatever is asked of it raises an error."""

    def __init__(self, error: RuntimeError) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        raise self.error
