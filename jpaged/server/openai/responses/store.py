"""Stores responses by key, within bounds and, with a folder, over a restart."""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jpaged.server.bodies import unhonoured
from jpaged.server.caller import Caller
from jpaged.server.errors import ApiError
from jpaged.server.openai.bodies.responses import InputItem, ResponsesRequest, keeper_of, new_response_id
from jpaged.server.openai.responses.answer import Answer
from jpaged.server.openai.responses.event_replay import without_false_ends
from jpaged.server.openai.responses.job import Job
from jpaged.server.openai.responses.kept_files import KeptFiles
from jpaged.server.serving import Serving

logger = logging.getLogger(__name__)
MOST_BYTES = 64 * 2**20
"""Limit on the bytes of all stored responses; running ones count with their events so far."""
Name = tuple[str, str]
"""A key's name ("" on a server without keys) and a response's id."""


class ResponseStore:
    """The responses of each key. A key with too many loses the oldest that has ended.

    Args:
        serving: runs the responses.
        most: responses stored for a key, running ones included.
        folder: stores requests and answers over a restart; None: a restart loses them.
        replica: name of this server among several, each of which stores its own; "": the only server.
    """

    def __init__(self, serving: Serving, most: int, folder: Path | None = None, replica: str = "") -> None:
        self._serving = serving
        self._most = most
        self._files = KeptFiles(folder)
        self._replica = replica
        self._kept: dict[Name, Job] = {}

    def begin(self, body: ResponsesRequest, caller: Caller) -> Job:
        """Start a response, and store it if the request says so.

        Raises:
            ApiError: a field is refused, or a background response would exceed the number that may run.
        """
        key_name = _key_name(caller)
        if body.previous_response_id is not None:
            body = self._continued(self.find(caller, body.previous_response_id, "previous_response_id"), body)
        name = new_response_id(caller.answer_id, self._replica)
        if (key_name, name) in self._kept:
            name += f"-{uuid.uuid4().hex[:12]}"
        record = None
        if self._files.used and body.is_stored and caller.idempotency_key is None:
            if body.seed is None:  # after a restart the client must see the same text again
                body = body.model_copy(update={"seed": secrets.randbits(62)})
            caller.idempotency_key = name
            record = self._record(key_name, name, body, caller)
        answer = Answer(self._serving, body, caller, name)
        job = Job(answer.state("queued"), _plain(body))
        if body.is_stored:
            self._keep((key_name, name), job, refuses=body.background)
        if record is not None:
            record["created"] = job.response["created_at"]
            self._files.write(record)
            job.log = self._files.log(key_name, name, fresh=True)
        self._start(job, answer, caller, record, waits=body.background)
        return job

    def _continued(self, before: Job, body: ResponsesRequest) -> ResponsesRequest:
        """Return a request with the previous response's conversation before its own input."""
        if not before.done:
            message = f"previous_response_id={body.previous_response_id!r} has not ended"
            raise ApiError(message, param="previous_response_id", code="invalid_value")
        history = [InputItem.model_validate(item) for item in [*before.input, *before.response["output"]]]
        return body.after(history)

    def _start(
        self, job: Job, answer: Answer, caller: Caller, record: dict[str, Any] | None, *, waits: bool = True
    ) -> None:
        """Start a job. A draining server counts it as active if it has no connection that it could wait for."""
        self._serving.num_active += waits

        def ended(task: asyncio.Task[None]) -> None:
            self._serving.num_active -= waits
            self._make_room(job)
            if record is not None and (record["key"], record["id"]) in self._kept and not job.was_cut_off:
                self._files.write({**record, "response": job.response})

        job.start(answer, caller.deadline).add_done_callback(ended)

    def find(self, caller: Caller, response_id: str, field: str = "response_id") -> Job:
        """Return a response of the caller's key.

        Args:
            field: the field of the request that names it.

        Raises:
            ApiError: 404; also if another key stores it, or another replica did.
        """
        job = self._kept.get((_key_name(caller), response_id))
        if job is None:
            keeper = keeper_of(response_id) if self._replica else None
            if keeper is not None and keeper != self._replica:
                message = f"the replica {keeper[:200]!r}, which kept this response, has ended, and the response with it"
                raise ApiError(message, status=404, param=field, code="replica_lost")
            message = f"there is no response {response_id[:200]!r}: it was deleted, replaced, or not stored"
            raise ApiError(message, status=404, param=field, code="response_not_found")
        return job

    async def delete(self, caller: Caller, response_id: str) -> None:
        """Delete a response; a running one ends.

        Raises:
            ApiError: see `find`.
        """
        job = self.find(caller, response_id)
        self._forget((_key_name(caller), response_id))
        await job.cancel()

    def _keep(self, name: Name, job: Job, *, refuses: bool = False) -> None:
        """Store a job. If all of its key's jobs run, it exceeds the limit or, with `refuses`, is refused: the engine's
        queue already bounds the jobs with a waiting client."""
        mine = [each for each in self._kept if each[0] == name[0]]
        if len(mine) >= self._most:
            ended = next((each for each in mine if self._kept[each].done), None)
            if ended is not None:
                self._forget(ended)
            elif refuses:
                message = f"{self._most} responses run, as many as are kept for one key"
                raise ApiError(message, status=429, code="too_many_responses", headers={"Retry-After": "1"})
        self._kept[name] = job
        self._make_room(job)

    def _make_room(self, newest: Job) -> None:
        """Forget the oldest jobs that have ended, but not the newest, until the limit on bytes holds."""
        size = sum(each.size for each in self._kept.values())
        for name, job in [each for each in self._kept.items() if each[1].done and each[1] is not newest]:
            if size <= MOST_BYTES:
                break
            size -= job.size
            self._forget(name)

    def _forget(self, name: Name) -> None:
        del self._kept[name]
        self._files.remove(*name)

    # ------------------------------------------------------------------ over a restart

    def _record(self, key_name: str, response_id: str, body: ResponsesRequest, caller: Caller) -> dict[str, Any]:
        return {
            "key": key_name,
            "id": response_id,
            "request_id": caller.request_id,
            "answer_id": caller.answer_id,
            "model": self._serving.settings.model,
            "body": body.model_dump(exclude_unset=True, by_alias=True),
            "unhonoured": unhonoured(body),
            "response": None,
        }

    def restore(self) -> None:
        """Load the stored responses. Ended ones stay as they are; the others continue, from their last token if the
        engine's saved state has them."""
        keys = {key.name: key for key in self._serving.settings.keys}
        for record in self._files.read():
            key_name, response_id = record["key"], record["id"]
            try:
                if record["model"] != self._serving.settings.model or (key_name and key_name not in keys):
                    raise ValueError("it belongs to another model or to a key that was removed")
                body = ResponsesRequest.model_validate(record["body"])
                body._unhonoured = dict(record.get("unhonoured", {}))
                caller = Caller(record["request_id"], key=keys.get(key_name), idempotency_key=response_id)
                caller.answer_id = record.get("answer_id", caller.request_id)
                sent = self._sent(key_name, response_id, ended=record["response"] is not None)
                if record["response"] is not None:
                    self._keep((key_name, response_id), Job.ended(record["response"], _plain(body), sent))
                    continue
                answer = Answer(self._serving, body, caller, response_id, record["created"])
                log = self._files.log(key_name, response_id)
                job = Job(answer.state("queued"), _plain(body), sent, log)
                self._keep((key_name, response_id), job)
                self._start(job, answer, caller, record)
            except (ApiError, ValidationError, ValueError, KeyError) as error:
                logger.error("a kept response is skipped: %s: %s", response_id, type(error).__name__)
                self._files.remove(key_name, response_id)

    def _sent(self, key_name: str, response_id: str, *, ended: bool) -> list[bytes | None] | None:
        """Return the events that clients may have received before; None if they are unknown."""
        events = self._files.events(key_name, response_id)
        return None if events is None else without_false_ends(events, ended=ended)


def _key_name(caller: Caller) -> str:
    return "" if caller.key is None else caller.key.name


def _plain(body: ResponsesRequest) -> list[dict[str, Any]]:
    return [item.model_dump(exclude_unset=True) for item in body.items]
