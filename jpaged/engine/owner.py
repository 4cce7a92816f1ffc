"""Gives access to an engine between steps, by the lock of the `LLM` that owns it or by an `AsyncLLM`'s thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

from jpaged.engine.engine import Engine
from jpaged.errors import EngineStopped

T = TypeVar("T")
Commit = Callable[[], T]
"""Changes or reads an engine's state. Call it between two steps, by `EngineAccess.run`."""


class EngineAccess(Protocol):
    """Runs functions between two steps of an engine.

    `OwnedEngine` takes the engine's lock; `jpaged.engine.thread.EngineThread` queues them for the engine's thread.
    """

    @property
    def engine(self) -> Engine:
        """Return the engine. Outside `run`, read only values that never change or that any thread may read."""

    def check(self) -> None:
        """Raise if the engine cannot be used through this access."""

    def run(self, commit: Commit[T]) -> T:
        """Call a function between two steps and return its result; its exceptions reach only the caller."""


class OwnedEngine:
    """Owns an engine: reports its health, lends it to an `AsyncLLM`, and frees it.

    Any thread may call any method; callers of `run` take turns. The devices' memory is free as soon as this object is
    closed or deleted, so no object that it refers to may refer to it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._lent = False
        # An engine is full of reference cycles: without this its memory would wait for the garbage collector.
        self._free = weakref.finalize(self, engine.close)
        self._free.atexit = False

    @property
    def engine(self) -> Engine:
        """Return the engine.

        Raises:
            EngineStopped: it was closed.
            RuntimeError: an `AsyncLLM` has it.
        """
        if self._engine is None:
            raise _closed()
        if self._lent:
            raise _is_lent()
        return self._engine

    def check(self) -> None:
        """Raise unless the engine can be used here.

        Raises:
            EngineStopped, RuntimeError: as `engine`; RuntimeError also in a fork of the process that made the engine.
        """
        _ = self.engine.lock

    def check_open(self) -> None:
        """Raise if the engine was closed; a lent engine is healthy.

        Raises:
            EngineStopped: it was closed.
        """
        if self._engine is None:
            raise _closed()

    def run(self, commit: Commit[T]) -> T:
        """Wait for the engine's lock, call a function and return its result.

        Raises:
            EngineStopped, RuntimeError: as `check`, also where the engine was lent or closed during the wait.
        """
        engine = self.engine
        with engine.lock:
            engine.check_available()
            return commit()

    def close(self) -> None:
        """Abort all requests and free the devices' memory; closing twice is harmless.

        Raises:
            RuntimeError: an `AsyncLLM` has the engine.
        """
        if self._engine is None:
            return
        engine, self._engine = self.engine, None
        engine.refusal = _closed
        self._free()

    def lend(self) -> Engine:
        """Lend the engine to an `AsyncLLM`, whose thread alone may touch it until `take_back`.

        Raises:
            RuntimeError: requests are running, or the engine is lent already.
        """
        engine = self.engine
        with engine.lock:
            engine.check_available()
            if engine.is_taken:
                raise RuntimeError("an AsyncLLM cannot take the engine while requests run")
            self._lent, engine.refusal = True, _is_lent
            return engine

    def take_back(self) -> None:
        """Take the engine back from the `AsyncLLM` that had it."""
        if self._engine is not None:
            self._lent, self._engine.refusal = False, None


def _closed() -> EngineStopped:
    return EngineStopped("this LLM was closed; make a new one to go on")


def _is_lent() -> RuntimeError:
    return RuntimeError("the engine is in use by an AsyncLLM; shut that down first")
