"""What `jpaged.AsyncLLM` does beside generating: the engine's state, weights, memory and health, asked from asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from jpaged.engine.engine import Engine
from jpaged.engine.metrics import metrics_of
from jpaged.engine.model_handle import ModelHandle
from jpaged.engine.new_weights import Running, replacement
from jpaged.engine.replica import chosen_replica
from jpaged.engine.saved_state.handle import make_keeper, name_of
from jpaged.engine.saved_state.periodic import PeriodicSaver
from jpaged.engine.sleep import Released, level_of, parts_of, release, restore, wake_parts
from jpaged.engine.stats import EngineStats
from jpaged.engine.thread import EngineThread
from jpaged.memory import MemoryMap, MemoryReport
from jpaged.metrics import Metric
from jpaged.outputs import PinnedPrefix, SavedState
from jpaged.text.input_processor import PREFILL_ONLY
from jpaged.text.prompt import Prompt
from jpaged.validation import number

T = TypeVar("T")


class AsyncHandle:
    """Asks an engine whose thread steps it, between two of its steps.

    Args:
        model: what was learnt of the model.
        engine: lent by it.
        thread: steps the engine.
    """

    def __init__(self, model: ModelHandle, engine: Engine, thread: EngineThread) -> None:
        self._model = model
        self._engine = engine
        self._thread = thread
        self._state = make_keeper(model, engine, thread.between_steps)
        self._saver: PeriodicSaver | None = None

    # ------------------------------------------------------------------ the engine's state

    async def save_state(self, folder: str | Path) -> SavedState:
        """Write the engine's state as it is between two steps, as `LLM.save_state` does. The engine pauses while the
        state is copied, and goes on while it is written."""
        return await asyncio.to_thread(self._state.save, folder)

    def save_every(self, folder: str | Path, seconds: float) -> None:
        """Save the state again and again, so many seconds after the last time and where something has happened since,
        until `shutdown`. `last_save` and a line in the log "jpaged.engine" tell how long the engine paused.

        Raises:
            ValueError: `seconds` is not positive.
            RuntimeError: it is being done already.
        """
        seconds = number("seconds", seconds, low=0.0, open_low=True)
        if self._saver is not None:
            raise RuntimeError("save_every() was called before: the state is being saved every so many seconds already")
        self._thread.check()
        self._saver = PeriodicSaver(partial(self._state.save, folder), self._moment, seconds)

    async def stop_saving(self) -> None:
        """End what `save_every` began, once the save that is being written is there; no error where nothing began."""
        if self._saver is not None:
            await asyncio.to_thread(self._saver.stop)

    @property
    def last_save(self) -> SavedState | None:
        """Return what the last of `save_every`'s saves took; None before the first."""
        return None if self._saver is None else self._saver.last

    def _moment(self) -> tuple[int, tuple[int, ...]]:
        return self._engine.stats.num_steps, tuple(self._engine.requests.awaited)

    async def load_state(self, folder: str | Path) -> list[str]:
        """Go on from a saved state, as `LLM.load_state` does, and return the names of the requests that came with it.

        They run at once, whether a client takes them up by `resume` or not; what they generate is kept until one does,
        or until `abort`.

        Args and raises: see `LLM.load_state`.
        """
        names = [name_of(request) for request in await asyncio.to_thread(self._state.load, folder)]
        await asyncio.wrap_future(self._thread.call(self._thread.know_restored))
        return names

    @property
    def restored_requests(self) -> list[str]:
        """Return the names of the restored requests that no client has taken up, in order of arrival."""
        return list(self._thread.restored)

    # ------------------------------------------------------------------ weights and sleep

    async def update_params(
        self, new: Any, *, cast: bool = False, copy: bool = False, running: Running = "recompute"
    ) -> None:
        """Replace the weights between two steps, as `LLM.update_params` does; clients go on as `running` says.

        What takes long is done beside the engine's thread, which pauses to swap the weights only.

        Args and raises: see `LLM.update_params`.
        """
        make = partial(replacement, self._model.held_weights, self._engine, new, cast=cast, copy=copy, running=running)
        put = await asyncio.to_thread(make)
        await asyncio.to_thread(self._thread.between_steps, put)

    async def release_memory(self, weights: Released = False) -> None:
        """Give the pool's memory back, and the weights' if asked, as `LLM.release_memory` does. Clients wait: their
        requests go on once it is restored, and new ones are queued.

        Args and raises: see `LLM.release_memory`.
        """
        await asyncio.to_thread(self._thread.between_steps, partial(release, self._engine, weights))

    async def restore_memory(self, params: Any = None) -> None:
        """Do what `LLM.restore_memory` does."""
        wake = await asyncio.to_thread(restore, self._model.held_weights, self._engine, params)
        await asyncio.to_thread(self._thread.between_steps, wake)

    async def sleep(self, level: int = 1) -> None:
        """Do what `LLM.sleep` does, with clients treated as by `release_memory`."""
        await self.release_memory(level_of(level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do what `LLM.wake_up` does."""
        wake = wake_parts(self._model.held_weights, self._engine, parts_of(tags))
        await asyncio.to_thread(self._thread.between_steps, wake)

    async def is_sleeping(self) -> bool:
        """Tell whether memory is given back."""
        return self._engine.is_asleep

    # ------------------------------------------------------------------ memory and health

    async def memory_report(self) -> MemoryReport:
        """Who holds the pool's blocks, between two steps."""
        return await asyncio.wrap_future(self._thread.call(self._engine.replicas[0].memory_report))

    async def memory_map(self, *, replica: int = 0) -> MemoryMap:
        """Return what lies in every large page and block of the pool, between two steps; requests have their names.

        Args and raises: see `LLM.memory_map`.
        """
        found = await self._ask(lambda: chosen_replica(self._engine.replicas, replica).memory_map())
        return found.named(self._thread.request_names())

    async def pin_prefix(self, prompt: Prompt, cache_salt: str | None = None) -> PinnedPrefix:
        """Do what `LLM.pin_prefix` does, best before clients come: while requests run it is refused.

        Args and raises: see `LLM.pin_prefix`.
        """
        inputs = self._model.input_processor
        prefix = await asyncio.to_thread(inputs.prefix, prompt, cache_salt)
        requests = [inputs.request(prefix, PREFILL_ONLY) for _ in self._engine.replicas]

        def pin() -> PinnedPrefix:  # a saved state may be loaded until then, and bring ids that were given before
            seq_id = inputs.new_seq_id()
            return PinnedPrefix(seq_id, self._engine.pin_prefix(seq_id, requests))

        return await self._ask(pin)

    async def unpin(self, pinned: PinnedPrefix) -> None:
        """Do what `LLM.unpin` does."""
        if not isinstance(pinned, PinnedPrefix):
            raise TypeError(f"unpin() takes what pin_prefix() returned, not {pinned!r}")
        await self._ask(lambda: self._engine.unpin(pinned.seq_id))

    async def _ask(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, between steps; what it raises concerns its caller alone."""

        def attempt() -> tuple[T | None, Exception | None]:
            try:
                return function(), None
            except Exception as error:
                return None, error

        result, error = await asyncio.wrap_future(self._thread.call(attempt))
        if error is not None:
            raise error
        return cast(T, result)

    def stats(self) -> EngineStats:
        """Give what `LLM.stats` gives; never waits for the engine."""
        return self._engine.snapshot()

    def get_metrics(self) -> list[Metric]:
        """Give what `LLM.get_metrics` gives."""
        return metrics_of(self.stats())

    async def check_health(self, timeout: float | None = None) -> None:
        """Do nothing while the engine's thread runs and, with a timeout, comes between two steps within it.

        Args:
            timeout: seconds to wait for the end of the step that runs; None = none is awaited.

        Raises:
            EngineStopped: `shutdown` was called, or the engine failed; its cause is the exception that ended it.
            TimeoutError: the step that runs has not ended in time.
        """
        self._thread.check()
        if timeout is not None:
            limit = number("timeout", timeout, low=0.0, open_low=True)
            await asyncio.wait_for(asyncio.wrap_future(self._thread.call(lambda: None)), limit)

    async def ended(self) -> None:
        """Wait until the engine's thread has ended, as `shutdown` makes it.

        Raises:
            EngineStopped: it ended because the engine failed; its cause is the exception that ended it.
        """
        await asyncio.shield(asyncio.wrap_future(self._thread.ended))
