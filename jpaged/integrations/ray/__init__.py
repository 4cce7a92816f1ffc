"""Spreads the server over replicas with Ray Serve, and prompts of a file over workers with Ray Data (extra `ray`).

`front.py` takes a request and sends it, as it is, to a replica; `replica.py` runs the whole server of `jpaged/server`
on one engine; `router.py` chooses the replica, by what `prefix_chain.py` makes of a body and `prefix_index.py`
remembers; `every_replica.py` asks all replicas for what concerns all; `kept_responses.py` finds the one that keeps a
response; `refusals.py` says what a client is told instead of an answer; `deployment.py` puts them together. `batch.py`
is the part for Ray Data. Only these modules import ray.
"""

from typing import Any

from jpaged.integrations.ray.arguments import RayArguments


def app(arguments: RayArguments) -> Any:
    """Return the application, for `serve run jpaged.integrations.ray:app model=...` and for Serve's config files."""
    from jpaged.integrations.ray.deployment import build

    return build(arguments)


__all__ = ["RayArguments", "app"]
