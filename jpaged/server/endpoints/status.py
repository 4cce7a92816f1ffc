"""The state of the server: `/health`, `/version`, `/v1/models`, `/v1/load`, `/metrics` and `/reset_prefix_cache`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from jpaged import EngineStopped, __version__
from jpaged.server.access import admin_only, open_to_all
from jpaged.server.errors import ApiError
from jpaged.server.openapi import errors
from jpaged.server.protocols import protocol_for
from jpaged.server.serving import Serving, serving_of

router = APIRouter()


@router.get("/health", responses=errors(503))
@open_to_all
async def health(request: Request) -> dict[str, str]:
    """Tell whether the server accepts requests and the engine's thread runs."""
    serving = serving_of(request)
    if serving.draining:
        raise ApiError("the server is shutting down", status=503, code="draining")
    try:
        await serving.engine.check_health(timeout=serving.settings.health_timeout)
    except EngineStopped as error:
        raise ApiError("the engine has stopped", status=503, code="engine_stopped") from error
    except TimeoutError as error:
        message = f"the engine's step has not ended for {serving.settings.health_timeout:g} s"
        raise ApiError(message, status=503, code="engine_stalled") from error
    return {"status": "ok"}


@router.get("/ping", responses=errors(503))
@open_to_all
async def ping(request: Request) -> dict[str, str]:
    """Answer as `/health` does; hosting services ask here."""
    return await health(request)


@router.get("/version")
async def version() -> dict[str, str]:
    """Return jpaged's version."""
    return {"version": __version__}


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the model, once for each of its names, and its adapters, in the form of the client's protocol."""
    serving, protocol = serving_of(request), protocol_for(request.scope)
    return protocol.models([protocol.model(_model(serving, name)) for name in serving.names])


@router.get("/v1/models/{name:path}", responses=errors(404))
async def model(name: str, request: Request) -> dict[str, Any]:
    """Describe the model, by one of its names, or an adapter. Without a name it lists them."""
    if not name:
        return await models(request)
    serving = serving_of(request)
    serving.check_model(name)
    return protocol_for(request.scope).model(_model(serving, name))


@router.get("/v1/load")
async def load(request: Request) -> dict[str, Any]:
    """Return the server's load, for a balancer of several servers."""
    serving = serving_of(request)
    stats = serving.engine.stats()
    return {
        "active": serving.num_active,
        "running": stats.num_running,
        "waiting": stats.num_waiting + serving.queue.num_waiting,
        "swapped": stats.num_swapped,
        "kv_cache_usage": stats.kv_cache_usage,
        "max_waiting": serving.settings.max_waiting,
        "draining": serving.draining,
    }


@router.get("/metrics", response_class=PlainTextResponse)
@admin_only
async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' text format."""
    return Response(serving_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.post("/reset_prefix_cache")
@admin_only
async def reset_prefix_cache(
    request: Request, reset_running_requests: bool = False, reset_external: bool = False
) -> dict[str, bool]:
    """Forget all cached KV, unless requests run; `success` says whether it was done."""
    for name, given in (("reset_running_requests", reset_running_requests), ("reset_external", reset_external)):
        if given:
            raise ApiError(f"{name}=true is not supported: requests end first", param=name, code="invalid_value")
    return {"success": await serving_of(request).engine.reset_prefix_cache()}


def _model(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "jpaged",
        "root": serving.settings.model,
        "parent": serving.settings.model if serving.adapter_of(name) else None,
        "max_model_len": serving.engine.max_model_len,
    }
