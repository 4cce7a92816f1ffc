"""Runs one engine with its whole server in an actor of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

from ray import serve

from jpaged.integrations.ray.arguments import RayArguments
from jpaged.integrations.ray.hints import REPLICA, Hint
from jpaged.server.connections import ABORT
from jpaged.server.logs import configure_logs

Message = MutableMapping[str, Any]
MOST_UNREAD = 256
"""Limit on the ASGI messages of an answer that wait for the front; then the app waits."""


class Replica:
    """The server of `jpaged serve` without a port: requests arrive as ASGI scopes and bodies.

    Serve calls `check_health` and replaces a replica that fails.
    """

    def __init__(self, arguments: RayArguments) -> None:
        from jpaged import (
            LLM,
            AsyncLLM,
        )  # local: Serve's controller and the fronts import this module without an engine
        from jpaged.server.app import create_app
        from jpaged.server.heaps import limit_heaps

        limit_heaps()
        configure_logs("info")
        settings = arguments.settings()
        llm = LLM(arguments.model, **arguments.engine)
        if arguments.warmup:
            llm.warmup()
        self._engine = AsyncLLM.from_llm(llm, max_waiting_requests=settings.max_waiting)
        self._health_timeout = settings.health_timeout
        self._name = serve.get_replica_context().replica_id.unique_id
        self._app = create_app(self._engine, settings, replica=self._name)

    async def check_health(self) -> None:
        """Check that the engine runs and that its steps end.

        Raises:
            EngineStopped: the engine failed.
            TimeoutError: a step has not ended within the server's `health_timeout`.
        """
        await self._engine.check_health(timeout=self._health_timeout)

    async def answer(self, hint: Hint, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message], None]:
        """Answer one request; yield lists of the ASGI messages since the last list.

        Cancelling the call means that the client disconnected: the request's memory is free before the next step.

        Args:
            hint: for the router; unused here.
            scope: HTTP scope, as plain data.
            body: the whole body.

        Raises:
            TimeoutError: the front did not read the answer in time, and the answer was cut off.
        """
        yield [{"type": REPLICA, "name": self._name}]
        unread = _Unread(MOST_UNREAD)
        aborted: list[bool] = []
        scope = {**scope, "extensions": {ABORT: lambda: aborted.append(True)}}
        running = asyncio.ensure_future(self._app(scope, _receiver(body), unread.put))
        running.add_done_callback(lambda _: unread.end())
        try:
            while messages := await unread.take():
                yield messages
            running.result()
            if aborted:
                raise TimeoutError("the answer was not read in time")
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await running

    async def __del__(self) -> None:
        """End the engine's thread, after the replica's requests have ended."""
        if engine := getattr(self, "_engine", None):
            await engine.shutdown()


class _Unread:
    """A bounded queue of messages from an app to the front.

    Args:
        most: number of messages at which `put` waits.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._messages: list[Message] = []
        self._ended = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()

    async def put(self, message: Message) -> None:
        """Add a message, when there is room."""
        while len(self._messages) >= self._most:
            self._room.clear()
            await self._room.wait()
        self._messages.append(message)
        self._news.set()

    def end(self) -> None:
        """Mark the end of the messages."""
        self._ended = True
        self._news.set()

    async def take(self) -> list[Message]:
        """Wait for messages and return all of them; an empty list at the end."""
        await self._news.wait()
        taken, self._messages = self._messages, []
        if not self._ended:
            self._news.clear()
        self._room.set()
        return taken


def _receiver(body: bytes) -> Any:
    """Return an ASGI `receive` that returns the body and then waits, like a client that reads."""
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for part in parts:
            return part
        await asyncio.Event().wait()
        raise AssertionError("the event is never set")

    return receive
