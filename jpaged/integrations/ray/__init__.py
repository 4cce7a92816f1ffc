"""Replicas of the server with Ray Serve, and batch generation over a dataset with Ray Data (extra `ray`).

A `Front` (front.py) takes a request, makes a `Hint` of it (hints.py) and sends both to a replica, which a router
(router.py) chooses by the prefixes that it has sent where (prefix_index.py). A `Replica` (replica.py) runs the whole
server of `jpaged.server` on one engine. every_replica.py merges the answers of all replicas, for metrics, load and
health. deployment.py assembles the application from `RayArguments`; batch.py is for Ray Data.
"""

from typing import Any

from jpaged.integrations.ray.arguments import RayArguments


def app(arguments: RayArguments) -> Any:
    """Return the application, for `serve run jpaged.integrations.ray:app model=...` and for Serve's config files."""
    from jpaged.integrations.ray.deployment import build

    return build(arguments)


__all__ = ["RayArguments", "app"]
