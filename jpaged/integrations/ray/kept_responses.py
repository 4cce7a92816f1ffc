"""Finds out which replica a request of `/v1/responses` needs: the one that keeps the response it is about."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic_core import from_json

from jpaged.server.response_ids import keeper_of

_PATH = "/v1/responses"


@dataclass(frozen=True)
class Need:
    """What a request needs of replicas.

    Attributes:
        replica: the one that keeps the response which the request is about; None = any will do.
        field: what names the response, "response_id" or "previous_response_id"; None = nothing does.
    """

    replica: str | None = None
    field: str | None = None


def need_of(path: str, body: bytes) -> Need:
    """Return what a request needs. One that is wrong needs nothing: a replica is to say so."""
    if path.startswith(f"{_PATH}/"):
        return Need(keeper_of(path[len(_PATH) + 1 :].partition("/")[0]), "response_id")
    if path != _PATH:
        return Need()
    try:
        fields = from_json(body)
    except ValueError:
        return Need()
    if not isinstance(fields, dict):
        return Need()
    before = fields.get("previous_response_id")
    return Need(keeper_of(before), "previous_response_id") if isinstance(before, str) else Need()
