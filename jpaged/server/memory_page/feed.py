"""Samples an engine for all pages that watch it: as often for a hundred of them as for one, and never for none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from jpaged import EngineStats, EngineStopped, MemoryMap
from jpaged.server.memory_page.messages import Sample, sample_message

RATE = 4.0
"""Messages a second."""

PATIENCE = 1.0
"""Seconds after which a page is told the gauges without a new map, as while a step compiles."""


class WatchedEngine(Protocol):
    """What is asked of an `AsyncLLM`."""

    async def memory_map(self, *, replica: int = 0) -> MemoryMap: ...

    def stats(self) -> EngineStats: ...


class MemoryFeed:
    """Makes the messages of one engine's memory page.

    Args:
        engine: an `AsyncLLM`, or what answers like one.
        stopping: tells that the server is about to end, so that streams end too.
        interval: seconds between two messages.
        replica: whose pool it is.
    """

    def __init__(
        self,
        engine: WatchedEngine,
        stopping: Callable[[], bool] = lambda: False,
        *,
        interval: float = 1 / RATE,
        replica: int = 0,
    ) -> None:
        self._replica = replica
        self._engine = engine
        self._stopping = stopping
        self._interval = interval
        self._lock = asyncio.Lock()
        self._pending: asyncio.Task[MemoryMap] | None = None
        self._latest: Sample | None = None
        self._written: tuple[Sample | None, Sample | None, str] = (None, None, "")

    async def messages(self) -> AsyncGenerator[str, None]:
        """Yield the whole pool, then every `interval` seconds what changed since; ends when the engine or the server
        does. A reader that is slow is told less often, of all that changed meanwhile."""
        told: Sample | None = None
        while not self._stopping():
            try:
                now = await self._sample()
            except EngineStopped:
                return
            if told is None:
                yield await asyncio.to_thread(sample_message, now, None)  # megabytes, where the pool is large
            else:
                yield self._message(now, told)
            told = now
            await asyncio.sleep(self._interval)

    async def _sample(self) -> Sample:
        """Return the engine as it is now; one that was taken for another page a moment ago will do."""
        async with self._lock:
            now = time.monotonic()
            if self._latest is not None and now - self._latest.seconds < 0.8 * self._interval:
                return self._latest
            if self._pending is None:
                self._pending = asyncio.create_task(self._engine.memory_map(replica=self._replica))
            # A page's first sample needs a map, however long that takes.
            patience = None if self._latest is None else max(PATIENCE, self._interval)
            await asyncio.wait({self._pending}, timeout=patience)
            if self._pending.done():
                done, self._pending = self._pending, None
                self._latest = Sample(done.result(), self._engine.stats(), time.monotonic())
            elif self._latest is not None:
                self._latest = Sample(self._latest.map, self._engine.stats(), time.monotonic(), late=True)
            assert self._latest is not None
            return self._latest

    def _message(self, now: Sample, told: Sample) -> str:
        """Write a message, once for all pages that were told the same."""
        if self._written[0] is not now or self._written[1] is not told:
            self._written = now, told, sample_message(now, told)
        return self._written[2]
