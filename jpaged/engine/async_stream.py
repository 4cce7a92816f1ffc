"""Delivers what the engine's thread generates to asyncio readers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from jpaged.scheduling import Request
from jpaged.text.token_reader import Progress

T = TypeVar("T")
_SHARE, _MOST = 0.1, 0.02


class AsyncStream(Generic[T]):
    """Holds what was put until its reader, who may be slow, takes all of it at once.

    Made by the coroutine that reads it, in its event loop. Only that loop touches what it holds, so there is no lock.

    Attributes:
        loop: the reader's event loop.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._items: list[T] = []
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: T | Exception) -> None:
        """Add an item and wake the reader; from any thread. An exception is raised in the reader, before any item."""
        deliver([(self, item)])

    def take(self, item: T | Exception) -> None:
        """Add an item as `put` does; in the reader's event loop only."""
        if isinstance(item, Exception):
            self._error = item
        else:
            self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> list[T]:
        """Wait for items and take them, in the order in which they were put."""
        if not self._items and self._error is None:
            self._reader = self.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if self._error is not None:
            raise self._error
        items, self._items = self._items, []
        return items


def deliver(pending: Iterable[tuple[AsyncStream[Any], Any]], wait: float = 0.0) -> None:
    """Put an item, or an exception, into each stream; from any thread. Each event loop is woken once for all of its
    streams: waking it for each of them would cost a step of many streams more than the items themselves do.

    Args:
        wait: most seconds to wait until the readers have dealt with what they got. Only one thread runs Python at a
            time, so a caller that goes on at once keeps them waiting (`sys.getswitchinterval`), and they it.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[AsyncStream[Any], Any]]] = {}
    for stream, item in pending:
        by_loop.setdefault(stream.loop, []).append((stream, item))
    dealt_with = []
    for loop, mine in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed, and its readers went with it
            done = threading.Event()
            loop.call_soon_threadsafe(_take_all, mine, done)
            dealt_with.append(done)
    end = time.monotonic() + wait
    for done in dealt_with:
        if (left := end - time.monotonic()) > 0:
            done.wait(left)


def delivery_wait(step_seconds: float) -> float:
    """Return the seconds that readers get to take in a step's tokens before the engine goes on, while its device is
    busy with the step behind it: a tenth of what the last one took, and 20 ms at most. What the engine does next is
    wanted at that step's end only; readers want the tokens now."""
    return min(_SHARE * step_seconds, _MOST)


def _take_all(pending: list[tuple[AsyncStream[Any], Any]], done: threading.Event) -> None:
    for stream, item in pending:
        stream.take(item)
    asyncio.get_running_loop().call_soon(done.set)  # behind the readers, which were woken before


@dataclass(eq=False)
class RequestStream:
    """A client's hold on its request. The engine's thread writes it, others read.

    Attributes:
        request: None until `EngineThread.submit` has it.
        aborted: whether somebody asked for the request's end.
        ended: whether the last of its progress, or an error, is on its way to the stream.
    """

    request_id: str
    updates: AsyncStream[Progress] = field(default_factory=AsyncStream)
    request: Request | None = None
    aborted: bool = False
    ended: bool = False

    @property
    def waiting(self) -> bool:
        """Tell whether the request was not admitted to the batch yet."""
        return not self.ended and (self.request is None or self.request.first_scheduled_time is None)

    def end(self, content: Progress | Exception) -> None:
        """Put the last thing the client gets."""
        self.ended = True
        self.updates.put(content)
