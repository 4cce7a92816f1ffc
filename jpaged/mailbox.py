"""From a thread to a coroutine, without a queue that could grow."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Holds the newest thing that was put; a reader that is slow misses what was replaced.

    Made by the coroutine that reads it, in its event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._content: T | Exception | None = None

    def put(self, content: T | Exception) -> None:
        """Replace the content and wake the reader; from any thread. An exception is raised in the reader."""
        with self._lock:
            woken = self._content is not None
            self._content = content
        if not woken:
            with contextlib.suppress(RuntimeError):  # the loop was closed, and the reader went with it
                self._loop.call_soon_threadsafe(self._arrived.set)

    async def get(self) -> T:
        """Wait for content and take it."""
        await self._arrived.wait()
        with self._lock:
            content, self._content = self._content, None
            self._arrived.clear()
        assert content is not None
        if isinstance(content, Exception):
            raise content
        return content
