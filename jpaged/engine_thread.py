"""The thread that owns a running engine, and what other threads may ask of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from jpaged.engine import Engine
from jpaged.errors import EngineBusy, EngineStopped
from jpaged.mailbox import Mailbox
from jpaged.outputs import RequestOutput
from jpaged.results import request_output
from jpaged.scheduling import Request, Status

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Ticket:
    """A client's hold on its request. The engine's thread writes it, others read.

    Attributes:
        request: None until the engine's thread has taken it in.
        num_tokens: tokens of its sequences when its output was last put into the mailbox.
        ended: the last output, or an error, is in the mailbox.
    """

    request_id: str
    mailbox: Mailbox[RequestOutput] = field(default_factory=Mailbox)
    request: Request | None = None
    num_tokens: int = 0
    ended: bool = False

    @property
    def waiting(self) -> bool:
        """It was not admitted to the batch yet."""
        return not self.ended and (self.request is None or self.request.first_scheduled_time is None)

    def end(self, content: RequestOutput | Exception) -> None:
        """Put the last thing the client gets."""
        self.ended = True
        self.mailbox.put(content)


class EngineThread:
    """Runs an engine's loop in a thread of its own, which alone touches the engine's state.

    Other threads reach it through a queue of calls, taken between steps. When the thread ends, for whatever reason,
    every client gets `EngineStopped` and every later call raises it.

    Args:
        tokenizer: for outputs of requests that made no text; None where the model has none.
        max_waiting_requests: most requests that wait for admission.
    """

    def __init__(self, engine: Engine, tokenizer: Any, *, max_waiting_requests: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_waiting = max_waiting_requests
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._lock = threading.Lock()  # of what stands below
        self._live: dict[str, Ticket] = {}
        self._stopped = False
        self._failure: BaseException | None = None
        self._stopping = False  # of the engine's thread, as is the next
        self._tickets: dict[Ticket, Request] = {}
        self._thread = threading.Thread(target=self._run, name="jpaged-engine", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """The engine's loop raised; its state cannot be trusted any more."""
        return self._failure is not None

    # ------------------------------------------------------------------ for other threads

    def submit(self, request_id: str, make_request: Callable[[], Request]) -> Ticket:
        """Queue a request; a coroutine calls it and reads the ticket's mailbox.

        Args:
            make_request: called in the engine's thread; what it raises is raised by the mailbox.

        Raises:
            ValueError: a request of this name is running.
            EngineBusy: max_waiting_requests are waiting.
            EngineStopped: the thread ended.
        """
        with self._lock:
            self._check_running()
            known = self._live.get(request_id)
            if known is not None and not known.ended:
                raise ValueError(f"request_id={request_id!r} is running already")
            waiting = sum(ticket.waiting for ticket in self._live.values())
            if waiting >= self._max_waiting:
                raise EngineBusy(f"{waiting} requests are waiting, and max_waiting_requests={self._max_waiting}")
            ticket = self._live[request_id] = Ticket(request_id)
            self._calls.put((lambda: self._add(ticket, make_request), Future()))
        return ticket

    def release(self, ticket: Ticket) -> None:
        """The client went away: its name is free at once, its memory before the next step."""
        with self._lock:
            if self._live.get(ticket.request_id) is ticket:
                del self._live[ticket.request_id]
            if not (ticket.ended or self._stopped):
                self._calls.put((lambda: self._abort(ticket), Future()))

    def abort(self, request_id: str) -> Future[None]:
        """End a request with finish_reason "abort"; one that is not running is left alone."""
        with self._lock:
            ticket = self._live.get(request_id)
        return self.call(lambda: self._abort(ticket))

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function in the engine's thread, between steps. If it raises, the engine has failed.

        Raises:
            EngineStopped: the thread ended.
        """
        with self._lock:
            self._check_running()
            future: Future[Any] = Future()
            self._calls.put((function, future))
        return future

    def stop(self) -> None:
        """Abort all requests, end the thread and wait for it; again is no error."""
        with self._lock:
            if not self._stopped:
                self._calls.put((self._begin_stopping, Future()))
        self._thread.join()

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
                if self._engine.has_work:
                    self._engine.step()
                    self._publish()
            for request in self._tickets.values():
                self._engine.abort(request)
            self._engine.drain()
        except BaseException as error:
            logger.exception("the engine's loop failed")
            failure = error
        self._close(failure)

    def _take_calls(self) -> None:
        """Run what others asked for; wait for it when there is nothing else to do."""
        while not self._stopping and not (self._calls.empty() and self._engine.has_work):
            function, future = self._calls.get()
            wanted = future.set_running_or_notify_cancel()
            try:
                result = function()
            except BaseException as error:
                if wanted:
                    future.set_exception(error)
                raise
            if wanted:
                future.set_result(result)

    def _publish(self) -> None:
        """Tell the clients of requests with new tokens."""
        for ticket, request in list(self._tickets.items()):
            num_tokens = sum(len(seq.token_ids) for seq in request.sequences)
            if request.status is Status.FINISHED:
                self._end(ticket)
            elif num_tokens > ticket.num_tokens:
                ticket.num_tokens = num_tokens
                ticket.mailbox.put(self._output(ticket))

    def _add(self, ticket: Ticket, make_request: Callable[[], Request]) -> None:
        try:
            request = make_request()
        except Exception as error:  # whatever a client sends, it is the client's error
            return ticket.end(error)
        try:
            self._engine.add(request)
        except ValueError as error:
            return ticket.end(error)
        ticket.num_tokens = sum(len(seq.token_ids) for seq in request.sequences)
        ticket.request = self._tickets[ticket] = request
        return None

    def _abort(self, ticket: Ticket | None) -> None:
        if ticket in self._tickets:
            assert ticket is not None
            self._engine.abort(self._tickets[ticket])
            self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        output = self._output(ticket)
        del self._tickets[ticket]
        ticket.end(output)

    def _output(self, ticket: Ticket) -> RequestOutput:
        return request_output(self._tickets[ticket], self._tokenizer, ticket.request_id)

    def _begin_stopping(self) -> None:
        self._stopping = True

    def _close(self, failure: BaseException | None) -> None:
        with self._lock:
            self._stopped, self._failure = True, failure
            live, self._live = self._live, {}
        for ticket in live.values():
            if not ticket.ended:
                ticket.end(self._error())
        while not self._calls.empty():
            _, future = self._calls.get()
            if future.set_running_or_notify_cancel():
                future.set_exception(self._error())
