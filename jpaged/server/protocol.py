"""Defines a protocol: what the code that all requests pass asks about the API that a path belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

if TYPE_CHECKING:
    from fastapi import APIRouter

    from jpaged.server.errors import ApiError


def bearer(headers: Headers) -> str | None:
    """Return the key of the header ``Authorization: Bearer KEY``; None if there is none."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else None


def message_within(body: Mapping[str, Any]) -> str:
    """Return the message of an error's body of the form ``{"error": {"message": ...}}``."""
    return body["error"]["message"]


def as_list(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return OpenAI's list of described models."""
    return {"object": "list", "data": models}


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One API, a folder of its own. Its row in `protocols.PROTOCOLS` is all that the rest of the server knows of it.

    Attributes:
        name: its name.
        paths: its paths; each stands for those below it too.
        header: a header that each of its clients sends. Requests with it to paths that no protocol names, as
            ``/v1/models``, are answered in its form; None: there is none.
        routers: imports and returns its routers. Ray's fronts read rows without an engine, and never call this.
        error: makes an error's body, from the error and the request's id.
        error_schema: the JSON schema of that body.
        error_event: name of the event of an error within a stream; None: events have no names.
        ping: what a stream has after some silence, which clients pass over; a comment as a rule.
        message: returns the message in an error's body.
        secret: returns the caller's key from the headers of a request; None: there is none.
        secret_header: the header that `secret` reads, for an error.
        id_header: the header of answers in which clients look for the request's id, which ``X-Request-Id`` has too.
        model: describes a served model to its clients, from OpenAI's description.
        models: makes the answer that lists described models.
        batch_paths: paths that a line of a batch may name.
        prompts: for each path with a prompt, what yields it from a body in the order of chat templates, as texts
            and lists: replicas route by it.
    """

    name: str
    paths: tuple[str, ...]
    header: str | None = None
    routers: Callable[[], tuple[APIRouter, ...]]
    error: Callable[[ApiError, str | None], dict[str, Any]]
    error_schema: Mapping[str, Any]
    error_event: str | None = None
    ping: bytes = b": ping\n\n"
    message: Callable[[Mapping[str, Any]], str] = message_within
    secret: Callable[[Headers], str | None] = bearer
    secret_header: str = "Authorization: Bearer KEY"
    id_header: str = "X-Request-Id"
    model: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    models: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]] = as_list
    batch_paths: tuple[str, ...] = ()
    prompts: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Any]]] = field(default_factory=dict)

    def has(self, path: str) -> bool:
        """Tell whether a path is the protocol's."""
        return any(path == own or path.startswith(f"{own}/") for own in self.paths)
