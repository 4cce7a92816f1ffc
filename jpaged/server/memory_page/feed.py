"""Samples an engine for all memory pages and writes their messages: changes of the pool, gauges and counters, in JSON.

The engine is sampled as often for a hundred pages as for one, and never for none. Page and block numbers are base64 of
little-endian 32-bit integers, which a browser reads without parsing:

    pages        page, group (-1 = free), ...
    blocks[g]    block, state, owners, tokens, request, sequence, prefix, last need, ...
    clock        the time to which last needs compare, modulo 2**32 like them

The first message to a page is the difference from an empty pool, with the names of the groups.
"""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jpaged import EngineStats, EngineStopped, MemoryMap

FIELDS = ("state", "owners", "tokens", "request", "sequence", "prefix", "last_need")
"""Fields of a block, in the order after its number."""


@dataclass(frozen=True)
class Sample:
    """The engine at one moment.

    Attributes:
        map: the pool between two steps; during a long step, the last one known.
        stats: gauges and counters.
        seconds: time of the sample, on a monotonic clock.
        late: whether the map is older than the sample.
    """

    map: MemoryMap
    stats: EngineStats
    seconds: float
    late: bool = False


def sample_message(now: Sample, before: Sample | None) -> str:
    """Return the message for a page that has `before`; None: it has nothing yet."""
    body = map_body(now.map, None if before is None else before.map)
    return json.dumps({**body, "stats": _stats(now), "late": now.late}, separators=(",", ":"))


def map_message(now: MemoryMap, before: MemoryMap | None) -> str:
    """Return the pool's part of the message."""
    return json.dumps(map_body(now, before), separators=(",", ":"))


def map_body(now: MemoryMap, before: MemoryMap | None) -> dict[str, Any]:
    """Return the differences of two maps, as fields of the message."""
    changes = now.changes(before)
    pages = np.stack([changes.pages, now.page_groups[changes.pages]], axis=1)
    body: dict[str, Any] = {
        "clock": now.clock % 2**32,
        "pages": _packed(pages),
        "blocks": [_packed(_rows(at, rows)) for at, rows in zip(changes.blocks, changes.records, strict=True)],
    }
    if before is None or before.request_names != now.request_names:
        body["names"] = now.request_names
    if before is None:
        body["pool"] = {
            "pages": now.num_pages,
            "pageBytes": now.page_bytes,
            "groups": [
                {"name": g.name, "blockSize": g.block_size, "blockBytes": g.block_bytes, "perPage": g.blocks_per_page}
                for g in now.groups
            ],
        }
    return body


def _rows(at: Any, records: Any) -> Any:
    """Return the numbers and records of blocks as rows of integers."""
    rows = np.empty((len(at), 1 + len(FIELDS)), np.int64)
    rows[:, 0] = at
    for column, name in enumerate(FIELDS, start=1):
        rows[:, column] = records[name]
    return rows


def _packed(numbers: Any) -> str:
    """Return the lowest 32 bits of integers as base64, little-endian."""
    return b64encode(numbers.astype("<i8", copy=False).astype("<i4").tobytes()).decode("ascii")


def _stats(sample: Sample) -> dict[str, float]:
    """Return the gauges and counters that the page plots."""
    stats = sample.stats
    return {
        "seconds": round(sample.seconds, 3),
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "swapped": stats.num_swapped,
        "preemptions": stats.num_preemptions,
        "steps": stats.step_times.count,
        "stepSeconds": round(stats.step_times.total, 6),
        "promptTokens": stats.num_prompt_tokens,
        "outputTokens": stats.num_output_tokens,
        "queries": stats.prefix_queries,
        "hits": stats.prefix_hits,
        "pages": stats.num_pages,
        "availablePages": stats.num_available_pages,
    }


RATE = 4.0
"""Messages a second."""

LONGEST_WAIT = 1.0
"""Seconds after which a page gets the gauges without a new map, for example while a step compiles."""


class WatchedEngine(Protocol):
    """The part of `AsyncLLM` that the feed uses."""

    async def memory_map(self, *, replica: int = 0) -> MemoryMap: ...

    def stats(self) -> EngineStats: ...


class MemoryFeed:
    """Makes the messages of one engine's memory pages.

    Args:
        engine: an `AsyncLLM`.
        stopping: returns whether the server is about to end, so that streams end too.
        interval: seconds between two messages.
        replica: number of the pool.
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
        """Yield the whole pool, then its changes every `interval` seconds, until the engine or the server ends.

        A slow reader gets fewer messages, each with all changes since its last one.
        """
        sent: Sample | None = None
        while not self._stopping():
            try:
                now = await self._sample()
            except EngineStopped:
                return
            if sent is None:
                yield await asyncio.to_thread(sample_message, now, None)  # megabytes for a large pool
            else:
                yield self._message(now, sent)
            sent = now
            await asyncio.sleep(self._interval)

    async def _sample(self) -> Sample:
        """Return a sample of the engine; one that another page needed a moment ago is reused."""
        async with self._lock:
            now = time.monotonic()
            if self._latest is not None and now - self._latest.seconds < 0.8 * self._interval:
                return self._latest
            if self._pending is None:
                self._pending = asyncio.create_task(self._engine.memory_map(replica=self._replica))
            # The first sample needs a map, however long that takes.
            timeout = None if self._latest is None else max(LONGEST_WAIT, self._interval)
            await asyncio.wait({self._pending}, timeout=timeout)
            if self._pending.done():
                done, self._pending = self._pending, None
                self._latest = Sample(done.result(), self._engine.stats(), time.monotonic())
            elif self._latest is not None:
                self._latest = Sample(self._latest.map, self._engine.stats(), time.monotonic(), late=True)
            assert self._latest is not None
            return self._latest

    def _message(self, now: Sample, sent: Sample) -> str:
        """Return a message, written once for all pages that have the same sample."""
        if self._written[0] is not now or self._written[1] is not sent:
            self._written = now, sent, sample_message(now, sent)
        return self._written[2]
