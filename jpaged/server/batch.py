"""Answers a file of requests in OpenAI's batch format. A run that was killed continues where it stopped."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from jpaged.server.protocols import batch_paths, protocol_of

_BEGINNING = '{"id": "batch_req_'
"""The beginning of every line of the output."""
TRIES_ALONE = 5
"""Retries of a request that the busy server refuses while no other request is in progress."""
_LEAST_WAIT = 0.05
"""Least seconds before a retry."""


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_requests(file: Path) -> list[BatchRequest]:
    """Read all requests of a file.

    Raises:
        ValueError: a line is not a valid request, or two share a custom_id; the message names the line.
    """
    requests: dict[str, BatchRequest] = {}
    for number, line in enumerate(file.read_bytes().decode("utf-8").split("\n"), start=1):  # text may have U+2028
        if not line.strip():
            continue
        request = _read_request(line, f"{file}, line {number}")
        if request.custom_id in requests:
            raise ValueError(f"{file}, line {number}: custom_id={request.custom_id!r} is that of an earlier line")
        requests[request.custom_id] = request
    return list(requests.values())


def _read_request(line: str, where: str) -> BatchRequest:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} must be an object")
    if unknown := found.keys() - {"custom_id", "method", "url", "body"}:
        raise ValueError(f"{where} has {sorted(unknown)}, which a request does not have")
    custom_id, url, body = found.get("custom_id"), found.get("url"), found.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(f"{where}: custom_id={custom_id!r} must be a non-empty string")
    if found.get("method") != "POST":
        raise ValueError(f"{where}: method={found.get('method')!r} must be 'POST'")
    if url not in batch_paths():
        raise ValueError(f"{where}: url={url!r} is not one of {', '.join(batch_paths())}")
    if not isinstance(body, dict):
        raise ValueError(f"{where}: body={body!r} must be an object")
    for name in ("stream", "background"):
        if body.get(name):
            raise ValueError(f"{where}: {name}=true has no meaning in a file")
    return BatchRequest(custom_id, url, body)


class Unanswered(RuntimeError):
    """Some requests have no final answer; a run with the same files sends them again."""


def is_final(status: int) -> bool:
    """Tell whether a status is final: a refusal would be repeated, but a failure or a busy server may not."""
    return status < 500 and status != 429


def answered(file: Path, *, tidy: bool = True) -> set[str]:
    """Return the custom_ids with a final answer in a file, and remove all other lines: see `is_final`.

    The incomplete last line of a killed run is removed too.

    Args:
        tidy: False leaves the file as it is.

    Raises:
        ValueError: a line is not an answer; the file is unchanged.
    """
    if not file.exists():
        return set()
    done: set[str] = set()
    failed: set[int] = set()
    whole = 0
    line = b"\n"
    with file.open("rb+" if tidy else "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n") and _is_cut_off(line):
                line = b"\n"
                break
            try:
                answer = json.loads(line)
                if is_final(answer["response"]["status_code"]):
                    done.add(answer["custom_id"])
                else:
                    failed.add(number)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}, line {number} is not an answer; give another output file") from error
            whole += len(line)
        if not tidy:
            return done
        lines.truncate(whole)
        if not line.endswith(b"\n"):  # another program wrote it
            lines.seek(whole)
            lines.write(b"\n")
    if failed:
        _without(file, failed)
    return done


def _is_cut_off(line: bytes) -> bool:
    """Tell whether an incomplete last line was written by `run_batch`."""
    beginning = _BEGINNING.encode()
    return line.startswith(beginning) or beginning.startswith(line)


def refusals(file: Path, requests: Sequence[BatchRequest]) -> int:
    """Return how many of the requests were refused, according to a file of answers."""
    asked = {request.custom_id for request in requests}
    with file.open("rb") as lines:
        answers = map(json.loads, lines)
        return sum(one["custom_id"] in asked and one["response"]["status_code"] != 200 for one in answers)


def _without(file: Path, numbers: set[int]) -> None:
    """Remove lines from a file atomically."""
    new = file.with_name(f"{file.name}.part")
    with file.open("rb") as lines, new.open("wb") as kept:
        kept.writelines(line for number, line in enumerate(lines, start=1) if number not in numbers)
        kept.flush()
        os.fsync(kept.fileno())
    new.replace(file)


async def run_batch(
    app: ASGIApp,
    requests: Sequence[BatchRequest],
    output: Path,
    *,
    concurrency: int,
    advance: Callable[[], None] = lambda: None,
) -> int:
    """Answer requests and append the answers as they come, each a line; return how many were refused.

    A request that the busy server refuses (429) is retried.

    Args:
        app: a server's app, without keys.
        concurrency: requests at once.
        advance: called after each answer.

    Raises:
        Unanswered: some requests have no final answer, and no line. No request is sent once the engine has stopped, or
            the output cannot be written.
    """
    waiting: Iterator[BatchRequest] = iter(requests)
    refused = num_answered = in_flight = 0
    stopped, why, full = False, "", ""
    retrying = asyncio.Lock()

    async def ask(request: BatchRequest) -> _Reply:
        nonlocal in_flight
        in_flight += 1
        try:
            return await _ask(app, request)
        finally:
            in_flight -= 1

    async def ask_until_admitted(request: BatchRequest) -> _Reply:
        reply, alone = await ask(request), 0
        if reply.status == 429:
            async with retrying:  # concurrent retries could refuse each other forever
                while reply.status == 429 and alone < TRIES_ALONE:
                    await asyncio.sleep(reply.wait)
                    if stopped:
                        break
                    alone = 0 if in_flight else alone + 1
                    reply = await ask(request)
        return reply

    with output.open("ab", buffering=0) as lines:  # a buffer would be written again when the file is closed

        async def work() -> None:
            nonlocal refused, num_answered, stopped, why, full
            for request in waiting:
                reply = await ask_until_admitted(request)
                if is_final(reply.status):
                    if full:  # a line after an incomplete one would be lost
                        return
                    line = json.dumps(_answer(request, reply)).encode() + b"\n"
                    try:
                        full = "" if lines.write(line) == len(line) else "the disk is full"
                    except OSError as error:
                        full = str(error)
                    if full:
                        stopped, why = True, f"{output} cannot be written: {full}"
                        return
                    refused += reply.status != 200
                    num_answered += 1
                    advance()
                elif not stopped:
                    stopped = reply.status == 503
                    message = protocol_of(request.url).message(reply.body)
                    why = f"{request.custom_id!r} got status {reply.status}: {message}"
                if stopped:
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(requests))):
                group.create_task(work())
        os.fsync(lines.fileno())
    if num_answered < len(requests):
        raise Unanswered(f"{len(requests) - num_answered} of {len(requests)} requests have no answer; {why}")
    return refused


@dataclass(frozen=True)
class _Reply:
    """The server's reply to a request.

    Attributes:
        wait: seconds until it may be sent again.
    """

    status: int
    body: dict[str, Any]
    wait: float


def _answer(request: BatchRequest, reply: _Reply) -> dict[str, Any]:
    """Return a line of the output."""
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",  # first: see _BEGINNING
        "custom_id": request.custom_id,
        "response": {"status_code": reply.status, "request_id": reply.body.get("id", ""), "body": reply.body},
        "error": None,
    }


async def _ask(app: ASGIApp, request: BatchRequest) -> _Reply:
    """Send one request to an app, without a socket."""
    content, sent = json.dumps(request.body).encode(), False
    status, wait, pieces = 500, 1.0, []

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # the client never disconnects
        sent = True
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, wait
        if message["type"] == "http.response.start":
            status = message["status"]
            after = Headers(raw=message.get("headers", [])).get("retry-after", "")
            wait = max(_LEAST_WAIT, float(after)) if after.isdecimal() else 1.0
        else:
            pieces.append(message.get("body", b""))

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request.url,
        "raw_path": request.url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": ("localhost", 80),
    }
    await app(scope, receive, send)
    return _Reply(status, json.loads(b"".join(pieces)), wait)
