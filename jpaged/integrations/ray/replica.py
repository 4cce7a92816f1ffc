"""One engine with its whole server, in an actor of Ray Serve."""

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
"""Most ASGI messages of an answer that wait for the front to take them; the app waits with those beyond."""


class Replica:
    """The server of `jpaged serve` without its port: requests come as ASGI scopes and bodies.

    Serve's own checks call `check_health`, and start another replica in the place of one that fails.
    """

    def __init__(self, arguments: RayArguments) -> None:
        from jpaged import (
            LLM,
            AsyncLLM,
        )  # here, as Serve's controller and the fronts import this module without an engine
        from jpaged.server.app import create_app

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
        """Do nothing while the engine runs and comes between two steps.

        Raises:
            EngineStopped: the engine failed.
            TimeoutError: its step has not ended within the server's `health_timeout`.
        """
        await self._engine.check_health(timeout=self._health_timeout)

    async def answer(self, hint: Hint, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message], None]:
        """Answer one request; yields ASGI messages as they come, those that came together in one list.

        Cancelling the call is the client going away: the request's memory is free before the next step.

        Args:
            hint: was for the router.
            scope: HTTP scope, as plain data.
            body: the whole body.

        Raises:
            TimeoutError: the answer was not taken in time, and ends before its end.
        """
        yield [{"type": REPLICA, "name": self._name}]
        unread = _Unread(MOST_UNREAD)
        given_up: list[bool] = []
        scope = {**scope, "extensions": {ABORT: lambda: given_up.append(True)}}
        running = asyncio.ensure_future(self._app(scope, _receiver(body), unread.put))
        running.add_done_callback(lambda _: unread.end())
        try:
            while messages := await unread.take():
                yield messages
            running.result()
            if given_up:
                raise TimeoutError("the answer was not taken in time")
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await running

    async def __del__(self) -> None:
        """End the engine's thread once Serve has let the replica's requests end."""
        if engine := getattr(self, "_engine", None):
            await engine.shutdown()


class _Unread:
    """Messages on their way from an app to who takes them, a bounded number at once.

    Args:
        most: messages beyond which `put` waits.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._messages: list[Message] = []
        self._ended = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()

    async def put(self, message: Message) -> None:
        """Add a message, once there is room."""
        while len(self._messages) >= self._most:
            self._room.clear()
            await self._room.wait()
        self._messages.append(message)
        self._news.set()

    def end(self) -> None:
        """Say that no message comes any more."""
        self._ended = True
        self._news.set()

    async def take(self) -> list[Message]:
        """Wait for messages and return all that are there; nothing at the end."""
        await self._news.wait()
        taken, self._messages = self._messages, []
        if not self._ended:
            self._news.clear()
        self._room.set()
        return taken


def _receiver(body: bytes) -> Any:
    """Return an ASGI `receive` that gives the body and then waits, as a client that reads does."""
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for part in parts:
            return part
        await asyncio.Event().wait()
        raise AssertionError("nobody sets the event")

    return receive
