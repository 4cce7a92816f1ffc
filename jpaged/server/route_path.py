"""Tells the path that an app routes by, below the one it is mounted at."""

from __future__ import annotations

from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """Return the path of a request without the ASGI root path before it, as Starlette's routing does.

    Whatever decides by the path has to decide by this one: "/llm/metrics" is "/metrics" to an app at "/llm".
    """
    path: str = scope["path"]
    below = path.removeprefix(scope.get("root_path", ""))
    return below if not below or below.startswith("/") else path
