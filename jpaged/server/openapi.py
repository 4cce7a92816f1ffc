"""The errors of each path in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from jpaged.server.access import PathAccess
from jpaged.server.protocols import protocol_of

_MEANINGS = {
    400: "The request is refused: the error names the value and the limit.",
    401: "The request has no key, or an unknown one.",
    403: "The path is for the keys of admins.",
    404: "The server has no such model or response.",
    408: "The request did not arrive in time.",
    409: "A request with the same Idempotency-Key runs.",
    413: "The body is larger than the limit.",
    429: "The key's rate is used up, or too many requests wait.",
    431: "The head of the request is longer than the limit.",
    500: "The server failed on the request.",
    503: "The server shuts down, or its engine has stopped or does not answer.",
    504: "The request took longer than the server allows.",
}
_ALL = (400, 408, 431, 500)
"""Statuses of any path: a server without keys checks the Host header, and each connection has limits."""


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a path with these errors, for its router's decorator."""
    content = {"application/json": {"schema": protocol_of("").error_schema}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


ERRORS = errors(*_ALL)
"""The errors of every path."""
GENERATES = errors(404, 409, 429, 503, 504)
"""Further errors of a path that generates."""


def describe_access(app: FastAPI, paths: PathAccess) -> None:
    """Add to the app's document the errors that follow from a path's access and body, and the form of its protocol's.

    FastAPI's 422 is left out: `jpaged.server.errors` answers 400.
    """
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            for path, operations in make()["paths"].items():
                for method, operation in operations.items():
                    further = errors(*_of_access(paths, path), *((413, 429) if method == "post" else ()))
                    for status, response in further.items():
                        operation["responses"].setdefault(str(status), response)
                    operation["responses"].pop("422", None)
                    form = {"application/json": {"schema": protocol_of(path).error_schema}}
                    for status, response in operation["responses"].items():
                        if int(status) >= 400:
                            response["content"] = form
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _of_access(paths: PathAccess, path: str) -> tuple[int, ...]:
    if paths.is_open(path):
        return ()
    return (401, 403) if paths.is_for_admins(path) else (401,)
