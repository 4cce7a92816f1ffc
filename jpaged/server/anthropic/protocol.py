"""Anthropic's row: the form of its errors, ``{"type": "error", "error": {"type", "message"}}``, and its paths."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from jpaged.server.protocol import Protocol, bearer

if TYPE_CHECKING:
    from fastapi import APIRouter

    from jpaged.server.errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TOKENS = re.compile(r"the prompt has (\d+) tokens\b.*?(?:max_model_len|max_tokens)=(\d+)", re.DOTALL)
_CHARACTERS = re.compile(
    r"the prompt has (\d+) characters, of which the first (\d+) have (\d+) tokens, more than \w+=(\d+)"
)
_TEXT = {"type": "string"}
_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": _TEXT, "message": _TEXT, "code": _TEXT},
        },
        "request_id": {"type": ["string", "null"]},
    },
}


def _routers() -> tuple[APIRouter, ...]:
    from jpaged.server.anthropic.endpoints import router

    return (router,)


def _error(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """Return the body of an error. Its `code` is an addition to Anthropic's form, as programs read it elsewhere."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.code == "context_length_exceeded" and (counts := _counts(message)) is not None:
        message = "prompt is too long: {} tokens > {} maximum".format(*counts)
    found: dict[str, Any] = {"type": kind, "message": message}
    if error.code is not None:
        found["code"] = error.code
    return {"type": "error", "error": found, "request_id": request_id}


def _counts(message: str) -> tuple[int, int] | None:
    """Return the tokens of a prompt that does not fit, and the most that do: clients compact by them.

    A text that is far too long is not tokenized whole. Its tokens are estimated by those of its beginning.
    """
    if (found := _TOKENS.search(message)) is not None:
        tokens, most = int(found[1]), int(found[2])
    elif (found := _CHARACTERS.search(message)) is not None:
        characters, begun, counted, most = map(int, found.groups())
        tokens = characters * counted // begun
    else:
        return None
    return max(tokens, most + 1), most


def _model(served: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "model",
        "id": served["id"],
        "display_name": served["id"],
        "created_at": datetime.fromtimestamp(served["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": served["max_model_len"],
        "max_tokens": served["max_model_len"],
    }


def _models(described: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all models on one page."""
    ids = [model["id"] for model in described]
    return {"data": described, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


def _secret(headers: Headers) -> str | None:
    """Return the key: that of ``x-api-key`` or, as gateways' clients send it, a bearer's."""
    given = headers.get("x-api-key")
    return bearer(headers) if given is None else given.strip()


def _prompt(fields: Mapping[str, Any]) -> Iterator[Any]:
    yield fields.get("tools")
    yield fields.get("system")
    yield fields.get("messages")


PROTOCOL = Protocol(
    name="anthropic",
    paths=("/v1/messages",),
    header="anthropic-version",
    routers=_routers,
    error=_error,
    error_schema=_ERROR,
    error_event="error",
    ping=b'event: ping\ndata: {"type":"ping"}\n\n',
    secret=_secret,
    secret_header="x-api-key: KEY",
    id_header="request-id",
    model=_model,
    models=_models,
    batch_paths=("/v1/messages",),
    prompts={"/v1/messages": _prompt},
)
