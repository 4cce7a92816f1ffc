"""What a client is told where a replica gave no answer, and which refusals another replica may not make."""

from __future__ import annotations

import json
import logging

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.types import Message

from jpaged.server.errors import ApiError, described

logger = logging.getLogger(__name__)
_ELSEWHERE = frozenset({"engine_busy", "engine_stopped", "draining"})
"""Codes of refusals that another replica may not make."""


def error_of(error: Exception) -> ApiError:
    """Return what a client is told of an error that came instead of an answer, or in its middle."""
    if isinstance(error, RayActorError):
        return ApiError("the replica that gave this answer has ended", status=503, code="replica_lost")
    if isinstance(error, BackPressureError):
        return ApiError(str(error), status=429, code="engine_busy", headers={"Retry-After": "1"})
    if isinstance(error, DeploymentUnavailableError):
        return ApiError("no replica can be started", status=503, code="replica_lost", headers={"Retry-After": "5"})
    logger.error("a request failed", exc_info=error)
    return described(error)


def is_refusal(start: Message, body: Message) -> bool:
    """Tell whether an answer says that this replica, of all there are, cannot take the request now."""
    if start["status"] not in (429, 503):
        return False
    try:
        return json.loads(body.get("body", b""))["error"]["code"] in _ELSEWHERE
    except (ValueError, KeyError, TypeError):
        return False
