"""Prints the command line's flags and the server's paths, one a line: ``surfaces.py [--write]``.

``jpaged bench`` is left out: it measures, and scripts do not depend on it. The public names, signatures and settings
are in ``tests/public_api.txt``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer

FLAGS, ROUTES = (Path(__file__).parent / name for name in ("flags.txt", "routes.txt"))


def flags() -> str:
    """Return each command's arguments and options, with defaults, sorted."""
    from jpaged.cli.main import app

    return "".join(f"{line}\n" for line in sorted(_flags("jpaged", typer.main.get_command(app))))


def _flags(name: str, command: Any) -> Iterator[str]:
    for parameter in command.params:
        spelled = "/".join([*parameter.opts, *parameter.secondary_opts])
        if parameter.name != "help":
            repeated = " (repeated)" if getattr(parameter, "multiple", False) else ""
            yield f"{name} {spelled} = {parameter.default}{repeated}"
    for child, other in sorted(getattr(command, "commands", {}).items()):
        if (name, child) != ("jpaged", "bench"):
            yield from _flags(f"{name} {child}", other)


def routes() -> str:
    """Return each path of the server with its methods, sorted."""
    from jpaged.server.app import create_app
    from jpaged.server.settings import ServerSettings

    config = SimpleNamespace(data_parallel_size=1, lora_modules={}, max_num_seqs=8)
    engine: Any = SimpleNamespace(config=config, max_model_len=64, max_media_bytes=0, adapters=())
    app = create_app(engine, ServerSettings(model="m"))
    return "".join(f"{line}\n" for line in sorted(set(_paths(app))))


def _paths(router: Any) -> Iterator[str]:
    """Yield each path below a router with a method; new versions of FastAPI keep the routers that were included."""
    for route in router.routes:
        if hasattr(route, "original_router"):
            yield from _paths(route.original_router)
        else:
            methods = set(getattr(route, "methods", None) or {"-"}) - {"HEAD"}
            yield from (f"{method} {route.path}" for method in methods)


if __name__ == "__main__":
    for file, found in ((FLAGS, flags()), (ROUTES, routes())):
        if sys.argv[1:] == ["--write"]:
            file.write_text(found, encoding="utf-8")
        print(found)
