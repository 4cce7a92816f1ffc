"""Runs one response in a task and keeps its events for all readers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from jpaged.server.errors import ClientGone, described
from jpaged.server.openai.responses.answer import Answer
from jpaged.server.openai.responses.event_replay import EventReplay, ends
from jpaged.server.openai.responses.kept_files import EventLog
from jpaged.server.streaming import event

logger = logging.getLogger(__name__)


class Job:
    """One response, its task and its events.

    An event's number is its index. Events sent before a restart keep their numbers; of the events generated again only
    the new part is emitted.

    Args:
        response, items, log: see the attributes.
        sent: the events that clients may have received before, with None for each that no longer holds. None: the
            events are unknown.

    Attributes:
        response: the response at its beginning, then at its end.
        input: the items that it answers, including those of previous responses.
        done: whether no more events will come.
        size: bytes of its events and input.
        log: receives every event before any reader; None: no log.
        begins_anew: whether clients may have received other events under the same numbers.
    """

    def __init__(
        self,
        response: dict[str, Any],
        items: list[dict[str, Any]],
        sent: Sequence[bytes | None] | None = (),
        log: EventLog | None = None,
    ) -> None:
        self.response = response
        self.input = items
        self.done = False
        self.begins_anew = sent is None
        self._events: list[bytes | None] = list(sent or ())
        self.size = len(json.dumps(items)) + sum(len(each) for each in self._events if each is not None)
        self._replay = EventReplay(())
        self.log = log
        self._error: Exception | None = None
        self._cancelled = False
        self._answer: Answer | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def ended(
        cls, response: dict[str, Any], items: list[dict[str, Any]], sent: Sequence[bytes | None] | None = ()
    ) -> Job:
        """Return a job that has ended, with its known events and a terminal one."""
        self = cls(response, items, sent)
        self.done = True
        if not ends(self._events):
            self._emit_end()
        return self

    @property
    def now(self) -> dict[str, Any]:
        """Return the response with its output so far."""
        if self.done or not self._events or self._answer is None:
            return self.response
        return self._answer.state("in_progress")

    @property
    def was_cut_off(self) -> bool:
        """Tell whether a server ended it that stops, or that cannot run what it restored, rather than its client."""
        if self._error is not None and described(self._error).status == 503:
            return True
        reason = (self.response["incomplete_details"] or {}).get("reason")
        return reason == "aborted" or (self.response["status"] == "cancelled" and not self._cancelled)

    def start(self, answer: Answer, deadline: float | None = None) -> asyncio.Task[None]:
        """Start the task and return it.

        Args:
            deadline: time on the loop's clock by which it has to end; None: no limit.
        """
        self._answer = answer
        self._replay = EventReplay(self._events)
        self._task = asyncio.create_task(self._run(answer, deadline))
        return self._task

    async def _run(self, answer: Answer, deadline: float | None) -> None:
        try:
            async with asyncio.timeout_at(deadline), aclosing(answer.events()) as events:
                async for kind, fields in events:
                    self.response = fields.get("response", self.response)
                    new = self._replay.unseen(kind, fields)
                    if new is not None:
                        self._emit(kind, new)
            self._error = answer.error
        except asyncio.CancelledError:
            if not ends(self._events):
                self.response = answer.state("cancelled")
                if self._cancelled:  # else the server ends, and a restarted one continues
                    self._emit_end()
        except Exception as error:
            if described(error).status == 500:
                logger.exception("a response failed")
            self._error = error
            self.response = answer.failed(error)
            if self._events:
                self._emit("response.failed", {"response": self.response})
        finally:
            self.done = True
            if self.log is not None:
                self.log.close()
            self._wake()

    def _emit_end(self) -> None:
        """Emit the terminal event of the response, after a first one, without which OpenAI's client takes no other."""
        if not self._events:
            unknown = dict.fromkeys(("error", "incomplete_details", "usage"))
            begun = {**self.response, "status": "in_progress", "output": [], **unknown}
            self._emit("response.created", {"response": begun})
        self._emit(f"response.{self.response['status']}", {"response": self.response})

    def _emit(self, kind: str, fields: dict[str, Any]) -> None:
        written = event({"type": kind, "sequence_number": len(self._events), **fields}, kind)
        if self.log is not None:
            self.log.append(written)
        self._events.append(written)
        self.size += len(written)
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, start: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield its events from number `start` on until it ends.

        Raises:
            ApiError, EngineStopped: it was refused before the first event.
        """
        while True:
            while start < len(self._events):
                found, start = self._events[start], start + 1
                if found is not None:
                    yield found
            if self.done:
                break
            await self._changed.wait()
        if self._error is not None and not self._events:
            raise self._error

    async def result(self) -> dict[str, Any]:
        """Wait for the end and return the response.

        Raises:
            ApiError, EngineStopped: it was refused, or failed.
            ClientGone: it was cancelled.
        """
        assert self._task is not None
        await asyncio.wait((self._task,))
        if self._error is not None:
            raise self._error
        if self.response["status"] == "cancelled":
            raise ClientGone
        return self.response

    async def cancel(self) -> None:
        """End it with its output so far; the engine has freed it when this returns. An ended job does not change."""
        if self._task is not None and not self.done:
            self._cancelled = True
            self._task.cancel()
            await asyncio.wait((self._task,))
