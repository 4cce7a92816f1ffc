"""Runs an engine in its own thread, and queues the calls of other threads for it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

from jpaged.engine.async_stream import RequestStream, deliver, delivery_wait
from jpaged.engine.engine import Engine
from jpaged.engine.owner import Commit
from jpaged.engine.process import check_process
from jpaged.errors import EngineBusy, EngineStopped
from jpaged.scheduling import Request
from jpaged.text.token_reader import TokenReader

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class _Call:
    """A function that the engine's thread is to run between two steps.

    Attributes:
        future: gets its result or its exception.
        contained: whether its exceptions go only to the caller; otherwise they stop the engine.
    """

    function: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)
    contained: bool = False


class EngineThread:
    """Runs an engine's loop in its own thread, the only one that touches the engine's state.

    Any thread, and any coroutine, may call the methods above the line "the engine's thread"; only `run` and `stop`
    wait. They queue calls, which the engine's thread runs between two steps. The methods below that line run in the
    engine's thread only. When the thread ends, for any reason, every client gets `EngineStopped` and every later call
    raises it.

    Args:
        max_waiting_requests: most requests that wait for admission.

    Attributes:
        ended: done when the thread has ended; its exception is `EngineStopped` if the engine's loop failed.
    """

    def __init__(self, engine: Engine, *, max_waiting_requests: int) -> None:
        self._engine = engine
        self._max_waiting = max_waiting_requests
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._lock = threading.Lock()  # guards the next four
        self._live: dict[str, RequestStream] = {}
        self._stopped = False
        self._failure: BaseException | None = None
        self._restored = engine.requests.restored_by_name()
        self._stopping = False  # only the engine's thread touches this one and the next
        self._readers: dict[RequestStream, TokenReader] = {}  # readers of the requests that run
        self._process = os.getpid()
        self.ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="jpaged-engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """Return the engine, also after the thread has ended; read only values that any thread may read."""
        return self._engine

    @property
    def failed(self) -> bool:
        """Tell whether the engine's loop raised; then its state cannot be trusted."""
        return self._failure is not None

    # ------------------------------------------------------------------ for other threads

    def check(self) -> None:
        """Raise unless the thread runs.

        Raises:
            EngineStopped: it ended.
            RuntimeError: this process is a fork of the one that has the thread.
        """
        check_process(self._process)
        with self._lock:
            self._check_running()

    def reserve(self, request_id: str) -> RequestStream:
        """Reserve a place among the waiting requests; a coroutine calls it, makes the request and submits it.

        Raises:
            ValueError: a request of this name is running, or came with a saved state.
            EngineBusy: max_waiting_requests are waiting.
            EngineStopped: the thread ended.
            RuntimeError: this process is a fork of the one that has the thread, as in `call`.
        """
        check_process(self._process)
        with self._lock:
            self._check_running()
            if request_id in self._restored:
                raise ValueError(f"request_id={request_id!r} came with a saved state: resume() takes it up")
            known = self._live.get(request_id)
            if known is not None and not known.ended:
                raise ValueError(f"request_id={request_id!r} is running already")
            waiting = sum(stream.waiting for stream in self._live.values())
            if waiting >= self._max_waiting:
                raise EngineBusy(f"{waiting} requests are waiting, and max_waiting_requests={self._max_waiting}")
            stream = self._live[request_id] = RequestStream(request_id)
        return stream

    def request_names(self) -> dict[int, str]:
        """Return the clients' names of running requests, by the engine's ids of all their parts."""
        with self._lock:
            live = [stream for stream in self._live.values() if stream.request is not None and not stream.ended]
        return {part.request_id: t.request_id for t in live if t.request is not None for part in t.request.all_requests}

    def submit(self, stream: RequestStream, request: Request, reader: TokenReader) -> None:
        """Queue a request; its reader's progress goes to the stream.

        A request that could never fit the pool makes the stream raise ValueError.
        """
        stream.request, request.name = request, stream.request_id
        with self._lock:
            if not (stream.ended or self._stopped):
                self._calls.put(_Call(lambda: self._add(stream, request, reader)))

    @property
    def restored(self) -> dict[str, Request]:
        """Return the requests that came with a saved state and that no client has taken up, by name."""
        with self._lock:
            return dict(self._restored)

    def resume(self, request_id: str, reader_of: Callable[[Request], TokenReader]) -> RequestStream:
        """Take up a request that came with a saved state; its tokens so far go to the stream first.

        Raises:
            ValueError: there is no such request, or a client has it already.
            EngineStopped, RuntimeError: as in `reserve`.
        """
        check_process(self._process)
        with self._lock:
            self._check_running()
            if request_id not in self._restored:
                raise ValueError(f"request_id={request_id!r} is none of the restored requests that wait for a client")
            known = self._live.get(request_id)
            if known is not None and not known.ended:  # it was here before the state was loaded
                raise ValueError(f"request_id={request_id!r} is running: the restored one waits until it has ended")
            request = self._restored.pop(request_id)
            stream = self._live[request_id] = RequestStream(request_id, request=request)
            self._calls.put(_Call(lambda: self._take_up(stream, reader_of(request))))
        return stream

    def release(self, stream: RequestStream) -> None:
        """Release the request of a client that left: its name is free at once, its memory before the next step."""
        with self._lock:
            if self._live.get(stream.request_id) is stream:
                del self._live[stream.request_id]
            if not self._stopped:
                self._calls.put(_Call(lambda: self._let_go(stream)))

    def abort(self, request_id: str) -> Future[None]:
        """End a request with finish_reason "abort"; one that is not running is left alone."""
        with self._lock:
            stream, restored = self._live.get(request_id), self._restored.pop(request_id, None)
            if stream is not None:
                stream.aborted = True
        if restored is not None:
            return self._call(lambda: self._engine.abort(restored))
        return self._call(lambda: self._abort(stream))

    def ask(self, commit: Commit[T]) -> Future[T]:
        """Run a function in the engine's thread, between steps; clients get any tokens that it produces.

        Its exceptions go to the future alone. Do not wait for the future in the engine's own thread.

        Raises:
            EngineStopped: the thread ended.
        """
        return self._call(commit, contained=True)

    def run(self, commit: Commit[T]) -> T:
        """Do what `ask` does, wait for the result and return it; see `EngineAccess.run`."""
        return self.ask(commit).result()

    def next_pause(self) -> Future[None]:
        """Return a future that is done once the thread is between two steps."""
        return self._call(lambda: None)

    def take_restored(self) -> Future[None]:
        """Let clients take up the requests that came with a saved state."""
        return self._call(self._take_restored)

    def _call(self, function: Callable[[], T], *, contained: bool = False) -> Future[T]:
        """Queue a function for the engine's thread. Unless it is contained, its exception stops the engine."""
        check_process(self._process)
        future: Future[T] = Future()
        with self._lock:
            self._check_running()
            self._calls.put(_Call(function, future, contained))
        return future

    def stop(self) -> None:
        """Abort all requests, end the thread and wait for it; calling it twice is harmless."""
        with self._lock:
            if not self._stopped:
                self._calls.put(_Call(self._begin_stopping))
        self._thread.join()

    def leave(self) -> None:
        """Ask the thread to end, without waiting: the garbage collector may call it in any thread."""
        self._calls.put(_Call(self._begin_stopping))

    def _check_running(self) -> None:
        if self._stopped:
            raise self._error()

    def _error(self) -> EngineStopped:
        if self._failure is None:
            return EngineStopped("the engine was shut down")
        error = EngineStopped(f"the engine's loop failed: {self._failure!r}")
        error.__cause__ = self._failure
        return error

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        failure = None
        try:
            while not self._stopping:
                self._take_calls()
                if self._engine.can_step:
                    self._engine.step()
                    ahead = any(replica.in_flight for replica in self._engine.replicas)
                    self._publish(delivery_wait(self._engine.stats.last_step_seconds) if ahead else 0.0)
            self._engine.abort(*self._engine.requests.awaited.values())
        except BaseException as error:
            logger.exception("the engine's loop failed")
            failure = error
        self._close(failure)

    def _take_calls(self) -> None:
        """Run the queued calls; wait for one if no step can run."""
        while not self._stopping and not (self._calls.empty() and self._engine.can_step):
            self._answer(self._calls.get())

    def _answer(self, call: _Call) -> None:
        future, contained = call.future, call.contained
        wanted = future.set_running_or_notify_cancel()
        published = not contained
        try:
            try:
                result = call.function()
            finally:
                if contained:
                    self._publish()  # before the caller hears of it; an error here stops the engine
                    published = True
        except BaseException as error:
            if wanted:
                future.set_exception(error)
            if not (contained and published and isinstance(error, Exception)):
                raise
        else:
            if wanted:
                future.set_result(result)
        finally:
            del call, future  # the error's traceback holds this frame: a cycle would keep the function's objects

    def _take_restored(self) -> None:
        with self._lock:
            self._restored = self._engine.requests.restored_by_name()

    def _publish(self, wait: float = 0.0) -> None:
        """Send all new tokens to their clients at once; `wait` is that of `deliver`."""
        pending = []
        for stream, reader in list(self._readers.items()):
            if (progress := reader.read()) is not None:
                pending.append((stream.updates, progress))
                if progress.finished:
                    del self._readers[stream]
                    stream.ended = True
        deliver(pending, wait)

    def _add(self, stream: RequestStream, request: Request, reader: TokenReader) -> None:
        try:
            self._engine.add(request)
        except ValueError as error:
            return stream.end(error)
        self._readers[stream] = reader
        stream.take()
        if stream.aborted:  # while its request was being made
            self._abort(stream)
        return None

    def _take_up(self, stream: RequestStream, reader: TokenReader) -> None:
        assert stream.request is not None
        self._engine.requests.restored.pop(stream.request.request_id, None)
        self._readers[stream] = reader
        self._publish()

    def _let_go(self, stream: RequestStream) -> None:
        self._abort(stream)
        if stream.request is not None:
            self._engine.abort(stream.request)  # it may have finished, and was kept for its client

    def _abort(self, stream: RequestStream | None) -> None:
        if stream in self._readers:
            assert stream is not None and stream.request is not None
            self._engine.abort(stream.request)
            self._publish()

    def _begin_stopping(self) -> None:
        self._stopping = True

    def _close(self, failure: BaseException | None) -> None:
        with self._lock:
            self._stopped, self._failure = True, failure
            live, self._live = self._live, {}
        for stream in live.values():
            if not stream.ended:
                stream.end(self._error())
        while not self._calls.empty():
            future = self._calls.get().future
            if future.set_running_or_notify_cancel():
                future.set_exception(self._error())
        if self.ended.set_running_or_notify_cancel():
            if failure is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(self._error())
