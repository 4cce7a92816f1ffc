"""A response that is being written, or was: its events, for all who follow them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from jpaged.server.errors import ClientGone, described
from jpaged.server.responses.answer import Answer
from jpaged.server.responses.event_replay import ToldBefore, ends
from jpaged.server.responses.kept_files import EventLog
from jpaged.server.streaming import event

logger = logging.getLogger(__name__)


class Job:
    """Writes one response in a task of its own.

    An event's number is its place among all. Where clients were told events before the server was killed, these keep
    their numbers, and of those that are made again only what is new is told.

    Args:
        response, items, log: see the attributes.
        told: events that clients may have been told before, with None for those that hold no longer; None = nobody
            knows which.

    Attributes:
        response: the response at its beginning or, once it is there, at its end.
        input: the items that it answers, those of the responses before it included.
        done: whether nothing more will come.
        size: bytes of its events and input.
        log: is told every event before anybody else; None = nothing is.
        begins_anew: whether clients may have been told other events under its numbers.
    """

    def __init__(
        self,
        response: dict[str, Any],
        items: list[dict[str, Any]],
        told: Sequence[bytes | None] | None = (),
        log: EventLog | None = None,
    ) -> None:
        self.response = response
        self.input = items
        self.done = False
        self.begins_anew = told is None
        self._events: list[bytes | None] = list(told or ())
        self.size = len(json.dumps(items)) + sum(len(each) for each in self._events if each is not None)
        self._before = ToldBefore(())
        self.log = log
        self._error: Exception | None = None
        self._unwanted = False
        self._answer: Answer | None = None
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def ended(
        cls, response: dict[str, Any], items: list[dict[str, Any]], told: Sequence[bytes | None] | None = ()
    ) -> Job:
        """Return a job that has ended, with the events that are known of it and one that tells of its end."""
        self = cls(response, items, told)
        self.done = True
        if not ends(self._events):
            self._tell(f"response.{response['status']}", {"response": response})
        return self

    @property
    def now(self) -> dict[str, Any]:
        """Return the response with what there is of its output."""
        if self.done or not self._events or self._answer is None:
            return self.response
        return self._answer.state("in_progress")

    @property
    def was_cut_off(self) -> bool:
        """Tell whether the server's end, and nobody's wish, ended it."""
        if self._error is not None and described(self._error).status == 503:
            return True
        reason = (self.response["incomplete_details"] or {}).get("reason")
        return reason == "aborted" or (self.response["status"] == "cancelled" and not self._unwanted)

    def start(self, answer: Answer, deadline: float | None = None) -> asyncio.Task[None]:
        """Begin to write, in the task that is returned.

        Args:
            deadline: time of the loop's clock when it has to have ended; None = whenever it does.
        """
        self._answer = answer
        self._before = ToldBefore(self._events)
        self._task = asyncio.create_task(self._run(answer, deadline))
        return self._task

    async def _run(self, answer: Answer, deadline: float | None) -> None:
        try:
            async with asyncio.timeout_at(deadline), aclosing(answer.events()) as events:
                async for kind, fields in events:
                    self.response = fields.get("response", self.response)
                    news = self._before.news(kind, fields)
                    if news is not None:
                        self._tell(kind, news)
            self._error = answer.error
        except asyncio.CancelledError:
            self.response = answer.state("cancelled")
        except Exception as error:
            if described(error).status == 500:
                logger.exception("a response failed")
            self._error = error
            self.response = answer.failed(error)
            if self._events:
                self._tell("response.failed", {"response": self.response})
        finally:
            self.done = True
            if self.log is not None:
                self.log.close()
            self._wake()

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        told = event({"type": kind, "sequence_number": len(self._events), **fields}, kind)
        if self.log is not None:
            self.log.append(told)
        self._events.append(told)
        self.size += len(told)
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def follow(self, start: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield its events from number `start` on, those to come included.

        Raises:
            ApiError, EngineStopped: it was refused before the first event.
        """
        while True:
            while start < len(self._events):
                told, start = self._events[start], start + 1
                if told is not None:
                    yield told
            if self.done:
                break
            await self._news.wait()
        if self._error is not None and not self._events:
            raise self._error

    async def result(self) -> dict[str, Any]:
        """Return the response at its end.

        Raises:
            ApiError, EngineStopped: it was refused, or failed.
            ClientGone: somebody cancelled it.
        """
        assert self._task is not None
        await asyncio.wait((self._task,))
        if self._error is not None:
            raise self._error
        if self.response["status"] == "cancelled":
            raise ClientGone
        return self.response

    async def cancel(self) -> None:
        """End it as it is; the engine has let go of it when this returns. One that has ended stays as it is."""
        if self._task is not None and not self.done:
            self._unwanted = True
            self._task.cancel()
            await asyncio.wait((self._task,))
