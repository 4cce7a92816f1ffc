"""One engine with its whole server, in an actor of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

from ray import serve

from jpaged.server.logs import configure_logs
from jpaged.server.ray.arguments import RayArguments
from jpaged.server.ray.call import REPLICA, Hint

Message = MutableMapping[str, Any]


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
        self._app = create_app(self._engine, settings)
        self._name = serve.get_replica_context().replica_id.unique_id

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
        """
        yield [{"type": REPLICA, "name": self._name}]
        messages: asyncio.Queue[Message] = asyncio.Queue()
        running = asyncio.ensure_future(self._app(scope, _receiver(body), messages.put))
        running.add_done_callback(lambda _: messages.put_nowait({"type": "end"}))
        try:
            ended = False
            while not ended:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                ended = batch[-1]["type"] == "end"
                if batch := batch[: len(batch) - ended]:
                    yield batch
            running.result()
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await running

    async def __del__(self) -> None:
        """End the engine's thread once Serve has let the replica's requests end."""
        if engine := getattr(self, "_engine", None):
            await engine.shutdown()


def _receiver(body: bytes) -> Any:
    """Return an ASGI `receive` that gives the body and then waits, as a client that reads does."""
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for part in parts:
            return part
        await asyncio.Event().wait()
        raise AssertionError("nobody sets the event")

    return receive
