"""Runs one engine with its whole server in an actor of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, MutableMapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ray import serve

from jpaged.integrations.ray.arguments import RayArguments
from jpaged.integrations.ray.held_chains import HeldChains
from jpaged.integrations.ray.hints import REPLICA, Hint
from jpaged.server.connections import ABORT
from jpaged.server.logs import configure_logs

if TYPE_CHECKING:
    from jpaged import RequestOutput

Message = MutableMapping[str, Any]
KEPT_EVENTS = 65_536
"""Changes of the cache that the engine keeps until they are read."""
MOST_READ = 4096
"""Changes that are read from the engine at once."""
_CHAIN: ContextVar[tuple[bytes, ...]] = ContextVar("chain", default=())
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
        from jpaged.server.settings import with_formats

        limit_heaps()
        configure_logs("info")
        options = {"kv_cache_events": KEPT_EVENTS} if arguments.follows_caches else {}
        llm = LLM(arguments.model, **options | arguments.engine)
        settings = with_formats(arguments.settings(), llm, **arguments.formats)
        if arguments.warmup:
            llm.warmup()
        self._engine = AsyncLLM.from_llm(llm, max_waiting_requests=settings.max_waiting)
        self._health_timeout = settings.health_timeout
        self._name = serve.get_replica_context().replica_id.unique_id
        self._app = create_app(self._engine, settings, replica=self._name)
        self._chains = HeldChains()
        self._served: list[tuple[tuple[bytes, ...], Sequence[int]]] = []
        self._next_event = 0
        self._follows = arguments.follows_caches
        if self._follows:
            self._app.state.serving.on_finished = self._finished

    async def check_health(self) -> None:
        """Check that the engine runs and that its steps end.

        Raises:
            EngineStopped: the engine failed.
            TimeoutError: a step has not ended within the server's `health_timeout`.
        """
        await self._engine.check_health(timeout=self._health_timeout)

    def _finished(self, output: RequestOutput) -> None:
        if chain := _CHAIN.get():
            self._served.append((chain, output.prompt_token_ids))

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return what changed in the cache, for the routers; Serve asks regularly."""
        if not self._follows:
            return {}
        served, self._served = self._served, []
        while True:
            found = await self._engine.cache_events(self._next_event, MOST_READ)
            self._chains.follow(found)
            self._next_event = found.next
            if len(found.events) < MOST_READ:
                break
        for chain, token_ids in served:
            self._chains.served(chain, token_ids)
        return self._chains.report()

    async def answer(self, hint: Hint, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message], None]:
        """Answer one request; yield lists of the ASGI messages since the last list.

        Cancelling the call means that the client disconnected: the request's memory is free before the next step.

        Args:
            hint: for the router; its chain names what the cache has of the prompt.
            scope: HTTP scope, as plain data.
            body: the whole body.

        Raises:
            TimeoutError: the front did not read the answer in time, and the answer was cut off.
        """
        yield [{"type": REPLICA, "name": self._name}]
        _CHAIN.set(hint.chain)  # the app's task has this context
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
