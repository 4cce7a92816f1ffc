"""The pages `/`, which links to what there is, and `/docs`, which draws the OpenAPI document."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from jpaged import __version__
from jpaged.server.access import open_to_all
from jpaged.server.memory_page.routes import HEADERS, POLICY
from jpaged.server.serving import serving_of

router = APIRouter()
_LINKS = {
    "docs": "what the server answers, path by path",
    "memory": "the engine's memory, live",
    "v1/models": "the names of the model and its adapters",
    "metrics": "metrics for Prometheus",
    "health": "whether requests are accepted",
    "openapi.json": "the OpenAPI document",
}
"""Paths relative to the page: the server may be mounted below another path."""


@router.get("/", include_in_schema=False)
@open_to_all
async def start(request: Request) -> Response:
    """Link to the pages there are."""
    links = "".join(f'<li><a href="{path}">/{path}</a>: {text}</li>' for path, text in _LINKS.items())
    model = escape(serving_of(request).settings.model)
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>jpaged</title>'
        '<meta name="color-scheme" content="light dark"><style>body { font: 15px/1.5 system-ui; margin: 2em }</style>'
        f"<h1>jpaged {__version__}</h1><p>The server has the model <b>{model}</b> under OpenAI's API. Clients take the "
        f"URL of this page with <code>/v1</code>.</p><ul>{links}</ul></html>"
    )
    return HTMLResponse(page, headers=HEADERS | {"Content-Security-Policy": POLICY})


@router.get("/docs", include_in_schema=False)
@open_to_all
async def docs() -> Response:
    """Draw the OpenAPI document. Nothing is loaded from other hosts."""
    return HTMLResponse(_file("docs.html"), headers=HEADERS | {"Content-Security-Policy": POLICY})


@router.get("/docs/page.js", include_in_schema=False)
@open_to_all
async def script() -> Response:
    """Return the script of `/docs`."""
    return Response(_file("docs.js"), media_type="text/javascript", headers=HEADERS)


def _file(name: str) -> bytes:
    return (files(__package__) / name).read_bytes()
