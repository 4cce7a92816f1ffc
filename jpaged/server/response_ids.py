"""Names responses; where there are several replicas, who keeps a response is part of its id."""

from __future__ import annotations

import re


def new_response_id(request_id: str, replica: str = "") -> str:
    """Return the id of a response, which `replica` keeps where it is not the only server."""
    return f"resp_{replica}-{request_id}" if replica else f"resp_{request_id}"


def keeper_of(response_id: str) -> str | None:
    """Return the replica that keeps a response; None where its id names none.

    >>> keeper_of(new_response_id("5f3", "x7k2m9qa"))
    'x7k2m9qa'
    """
    named = re.match(r"resp_([A-Za-z0-9]+)-", response_id)
    return named.group(1) if named else None
