"""Runs a server until a signal drains it, or a failure of the engine ends it at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from jpaged import AsyncLLM, EngineStopped, StateRefused
from jpaged.claims import Claim
from jpaged.server.app import create_app
from jpaged.server.connections import connections
from jpaged.server.kept_state import KeptState
from jpaged.server.openai.responses.store import ResponseStore
from jpaged.server.serving import Serving
from jpaged.server.settings import ServerSettings, claim_state
from jpaged.server.tracing import Traces

logger = logging.getLogger("jpaged.server")
FAILED = 70
"""Exit status if the engine failed (EX_SOFTWARE)."""
_GRACE = 5.0
"""Seconds for the last answers after a failure of the engine, or after a second signal; then the process ends."""


class Server(uvicorn.Server):
    """A uvicorn server that answers `/health` while running requests end.

    The first SIGTERM or SIGINT begins to drain: new requests get 503, running ones have `drain_seconds`, and those left
    then are cut off with what they have. A second signal cuts them off at once, and a third ends the server.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        app: FastAPI,
        on_ready: Callable[[str], None] | None = None,
        claim: Claim | None = None,
    ) -> None:
        super().__init__(config)
        serving: Serving = app.state.serving
        self.failed = False
        settings = serving.settings
        self.kept = KeptState(serving.engine, settings.state_dir, settings.save_every, settings.health_timeout, claim)
        self._serving = serving
        self._responses: ResponseStore = app.state.responses
        self._on_ready = on_ready
        self._drained: asyncio.Task[None] | None = None
        self._hurried: asyncio.Task[None] | None = None
        self._watched: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: Any = None) -> None:
        """Restore the saved state, open the port, and begin to watch the engine."""
        self._loop = asyncio.get_running_loop()
        await self.kept.restore()
        self._responses.restore()
        await super().startup(sockets)
        self._watched = asyncio.create_task(self._watch_engine())
        if self._on_ready is not None and self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            self._on_ready(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port, end the connections, and let another server use the folder of the state."""
        await super().shutdown(sockets)
        self.kept.release()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain at the first signal, cut requests off at the second, and end at once at the third."""
        if self._loop is None or self.failed or self._hurried is not None:
            self.should_exit = self.force_exit = True
            _exit_after(_GRACE)
            return
        if self._serving.draining:
            _exit_after(_GRACE)
            self._loop.call_soon_threadsafe(self._begin_hurrying, signal.Signals(sig).name)
            return
        self._serving.draining = True
        self._loop.call_soon_threadsafe(self._begin_draining, signal.Signals(sig).name)

    def _begin_draining(self, why: str) -> None:
        logger.info("%s: %d requests have %g s to end", why, self._serving.num_active, self._drain_seconds)
        self._drained = asyncio.create_task(self._drain())

    def _begin_hurrying(self, why: str) -> None:
        if self._hurried is not None:
            return
        logger.warning("%s again: %d requests are cut off", why, self._serving.num_active)
        self._hurried = asyncio.create_task(self._cut_off())

    @property
    def _drain_seconds(self) -> float:
        return self._serving.settings.drain_seconds

    async def _drain(self) -> None:
        if not await self._ended_within(self._drain_seconds):
            logger.warning("%d requests are cut off", self._serving.num_active)
            await self._cut_off()
        self.should_exit = True

    async def _cut_off(self) -> None:
        """Save the running requests, end them with what they have, and let the server exit."""
        await self.kept.save_last()
        if self.kept.stalled:
            _exit_after(_GRACE)
        with contextlib.suppress(EngineStopped, TimeoutError):
            async with asyncio.timeout(_GRACE):  # a step may never end
                await self._serving.cut_off()
        await self._ended_within(_GRACE)
        self.should_exit = True

    async def _ended_within(self, seconds: float) -> bool:
        """Wait for the last answer; tell whether it ended in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._serving.num_active:
                    await asyncio.sleep(0.02)
        return not self._serving.num_active

    async def _watch_engine(self) -> None:
        try:
            await self._serving.engine.ended()
        except EngineStopped:
            logger.critical("the engine failed, and the server ends", exc_info=True)
            self.failed = True
            self._serving.draining = self.should_exit = True
            _exit_after(_GRACE)


def _exit_now() -> None:
    """End the process with status `FAILED`, without waiting for its threads.

    If a device has failed or a step never ends, the exit handlers of Python and XLA may wait forever. So may a flush to
    a pipe without a reader.
    """
    flushing = threading.Thread(target=_flush, name="jpaged-flush", daemon=True)
    flushing.start()
    flushing.join(1.0)
    os._exit(FAILED)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its other end was closed
            stream.flush()


def _exit_after(seconds: float) -> threading.Timer:
    """End the process with status `FAILED` after some seconds, unless it ends before or the timer is cancelled."""
    last = threading.Timer(seconds, _exit_now)
    last.name, last.daemon = "jpaged-exit", True
    last.start()
    return last


def uvicorn_config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    """Return uvicorn's configuration."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=connections(settings.read_timeout),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=30,
    )


def run_server(
    engine: AsyncLLM,
    settings: ServerSettings,
    on_ready: Callable[[str], None] | None = None,
    claim: Claim | None = None,
) -> int:
    """Serve until a signal ends the server; then shut the engine down.

    Args:
        on_ready: called with the server's URL when it accepts requests.
        claim: that of the folder of the state, see `settings.claim_state`; None: it is claimed here. It is held until
            the last task has ended, since those of stored responses write to the folder.

    Returns:
        The exit status, 0. If the engine failed this does not return: the process ends with `FAILED`.
    """
    if claim is None and settings.state_dir is not None:
        try:
            claim = claim_state(settings.state_dir)
        except (OSError, StateRefused):
            asyncio.run(engine.shutdown())
            raise
        with claim:
            return run_server(engine, settings, on_ready, claim)
    endpoint = settings.otlp_traces_endpoint
    traces = None if endpoint is None else Traces.to_collector(endpoint, settings.model)
    app = create_app(engine, settings, traces)
    config = uvicorn_config(app, settings)
    server = Server(config, app, on_ready, claim)
    gc.collect()
    gc.freeze()  # a full collection would scan the libraries' objects and stop every stream for 0.4 s

    async def main() -> None:
        try:
            await server.serve()
        finally:
            if server.started and not server.failed:  # a start that fails leaves the saved state as it was
                await server.kept.save_last()
            wait = 0.0 if server.kept.stalled else settings.health_timeout
            last = _exit_after(wait + _GRACE)  # the running step may never end
            await engine.shutdown()
            last.cancel()
            if traces is not None:
                await asyncio.to_thread(traces.close)

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        try:
            runner.run(main())
        finally:
            if server.failed:
                _exit_now()
    return 0
