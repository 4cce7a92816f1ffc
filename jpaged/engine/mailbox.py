"""How a thread hands things to a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Holds what was put until its reader, who may be slow, takes all of it at once.

    Made by the coroutine that reads it, in its event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._items: list[T] = []
        self._error: Exception | None = None

    def put(self, item: T | Exception) -> None:
        """Add an item and wake the reader; from any thread. An exception is raised in the reader, before any item."""
        with self._lock:
            woken = bool(self._items) or self._error is not None
            if isinstance(item, Exception):
                self._error = item
            else:
                self._items.append(item)
        if not woken:
            with contextlib.suppress(RuntimeError):  # the loop was closed, and the reader went with it
                self._loop.call_soon_threadsafe(self._arrived.set)

    async def get(self) -> list[T]:
        """Wait for items and take them, in the order in which they were put."""
        await self._arrived.wait()
        with self._lock:
            items, self._items = self._items, []
            self._arrived.clear()
        if self._error is not None:
            raise self._error
        return items
