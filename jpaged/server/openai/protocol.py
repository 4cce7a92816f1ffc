"""OpenAI's row: the form of its errors, ``{"error": {"message", "type", "param", "code"}}``, and its paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jpaged.server.protocol import Protocol

if TYPE_CHECKING:
    from fastapi import APIRouter

    from jpaged.server.errors import ApiError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _routers() -> tuple[APIRouter, ...]:
    from jpaged.server.openai.endpoints import chat, completions, responses, vectors

    return completions.router, chat.router, responses.router, vectors.router


def _error(error: ApiError, request_id: str | None) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _of_chat(fields: Mapping[str, Any]) -> Iterator[Any]:
    yield fields.get("tools")
    yield fields.get("messages")


def _of_completion(fields: Mapping[str, Any]) -> Iterator[Any]:
    prompt = fields.get("prompt")
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    yield prompt[0] if several else prompt  # the first of several prompts decides


def _of_response(fields: Mapping[str, Any]) -> Iterator[Any]:
    yield fields.get("tools")
    yield fields.get("instructions")
    yield fields.get("input")


PROTOCOL = Protocol(
    name="openai",
    paths=("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank"),
    routers=_routers,
    error=_error,
    error_schema=_ERROR,
    batch_paths=(
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
    ),
    prompts={
        "/v1/chat/completions": _of_chat,
        "/v1/completions": _of_completion,
        "/v1/responses": _of_response,
    },
)
