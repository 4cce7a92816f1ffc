"""Delivers what the engine's thread generates to asyncio readers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from jpaged.scheduling import Request
from jpaged.text.token_reader import Progress

T = TypeVar("T")
_SHARE, _MOST = 0.1, 0.02


class AsyncStream(Generic[T]):
    """Buffers items for one reader, which may be slow and takes all of them at once.

    The coroutine that reads the stream makes it, in its event loop. Only that loop touches the buffer, so there is no
    lock.

    Attributes:
        loop: the reader's event loop.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._items: list[T] = []
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: T | Exception) -> None:
        """Add an item and wake the reader; any thread may call it.

        The reader raises an exception before it gets any item.
        """
        deliver([(self, item)])

    def take(self, item: T | Exception) -> None:
        """Add an item as `put` does. Call it only in the reader's event loop."""
        if isinstance(item, Exception):
            self._error = item
        else:
            self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> list[T]:
        """Wait for items and return them in the order in which they were put."""
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
    """Put an item, or an exception, into each stream; any thread may call it.

    Each event loop is woken once for all of its streams. In a step with many streams, one wake-up for each stream would
    cost more than the items do.

    Args:
        wait: most seconds to wait until the readers have handled their items. Only one thread runs Python at a time, so
            a caller that continues at once delays the readers (`sys.getswitchinterval`), and they delay the caller.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[AsyncStream[Any], Any]]] = {}
    for stream, item in pending:
        by_loop.setdefault(stream.loop, []).append((stream, item))
    dealt_with = []
    for loop, mine in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed, and its readers ended with it
            done = threading.Event()
            loop.call_soon_threadsafe(_take_all, mine, done)
            dealt_with.append(done)
    end = time.monotonic() + wait
    for done in dealt_with:
        if (left := end - time.monotonic()) > 0:
            done.wait(left)


def delivery_wait(step_seconds: float) -> float:
    """Return for how many seconds the engine waits for readers of a step's tokens, while its device runs the next step.

    That is a tenth of the last step's time, and 20 ms at most. Readers want the tokens now, whereas the engine's next
    work is needed only when the device has finished its step.
    """
    return min(_SHARE * step_seconds, _MOST)


def _take_all(pending: list[tuple[AsyncStream[Any], Any]], done: threading.Event) -> None:
    for stream, item in pending:
        stream.take(item)
    asyncio.get_running_loop().call_soon(done.set)  # runs after the readers, which were woken first


@dataclass(eq=False)
class RequestStream:
    """Connects a client to its request.

    The engine's thread writes `updates` and `ended`; other threads write `request` and `aborted`.

    Attributes:
        request: None until `EngineThread.submit` has it.
        on_taken: called in the client's event loop once the engine has the request.
        aborted: whether `EngineThread.abort` was called for the request.
        ended: whether the last progress, or an error, was sent to the stream.
    """

    request_id: str
    updates: AsyncStream[Progress] = field(default_factory=AsyncStream)
    request: Request | None = None
    on_taken: Callable[[], None] | None = None
    aborted: bool = False
    ended: bool = False

    @property
    def waiting(self) -> bool:
        """Tell whether the request still waits for admission to the batch."""
        return not self.ended and (self.request is None or self.request.first_scheduled_time is None)

    def take(self) -> None:
        """Tell the client that the engine has its request; any thread may call it."""
        if self.on_taken is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, and its readers ended with it
                self.updates.loop.call_soon_threadsafe(self.on_taken)

    def end(self, content: Progress | Exception) -> None:
        """Send the client its last item."""
        self.ended = True
        self.updates.put(content)
