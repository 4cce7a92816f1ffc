"""Assembles fronts and replicas to one application of Ray Serve."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from jpaged import ImageSources
from jpaged.integrations.ray.arguments import RayArguments
from jpaged.integrations.ray.front import Front
from jpaged.integrations.ray.replica import Replica
from jpaged.server.middleware import BodyLimit
from jpaged.server.protocols import add_handlers

REPORT_SECONDS = 2.0
"""Seconds between two reports of what a replica's cache has."""
_MANY = 100_000
"""A limit that no front reaches: the replicas limit requests, with OpenAI's errors."""


@serve.ingress()
class FrontDeployment:
    """Serves `Front` on Serve's own HTTP port."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._max_body_bytes = max_body_bytes

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the app; Serve calls this in the front's process."""
        limit = Middleware(BodyLimit, max_bytes=self._max_body_bytes)
        app = Starlette(routes=[Route("/{path:path}", endpoint=Front(self._replicas))], middleware=[limit])
        add_handlers(app)
        return app


def build(arguments: RayArguments) -> serve.Application:
    """Return the application for `serve.run`."""
    settings = arguments.settings()
    places = arguments.max_num_seqs
    options: dict[str, Any] = {"num_replicas": arguments.min_replicas}
    if arguments.max_replicas > arguments.min_replicas:
        target = arguments.target_ongoing_requests or max(1.0, 0.75 * places)
        scaling = AutoscalingConfig(
            min_replicas=arguments.min_replicas,
            max_replicas=arguments.max_replicas,
            target_ongoing_requests=target,
            upscale_delay_s=arguments.upscale_delay_s,
            downscale_delay_s=arguments.downscale_delay_s,
        )
        options = {"autoscaling_config": scaling}
    if arguments.routing == "prefix":
        overload = max(2, places // 2) if arguments.overload is None else arguments.overload
        options["request_router_config"] = RequestRouterConfig(
            request_router_class="jpaged.integrations.ray.router:PrefixRouter",
            request_router_kwargs={"overload": overload, "max_chunks": arguments.prefix_chunks},
            request_routing_stats_period_s=REPORT_SECONDS,
        )
    else:
        router = RequestRouterConfig(request_router_class="jpaged.integrations.ray.router:LoadRouter")
        options["request_router_config"] = router
    replicas = serve.deployment(
        Replica,
        name="replica",
        ray_actor_options=arguments.resources,
        max_ongoing_requests=places + settings.max_waiting,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        health_check_timeout_s=settings.health_timeout + 5.0,
        **options,
    )
    front = serve.deployment(
        FrontDeployment,
        name="front",
        num_replicas=arguments.fronts,
        max_ongoing_requests=_MANY,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        ray_actor_options={"num_cpus": 0},
    )
    # A front knows no model: where that takes text only, the replica refuses what is larger than its own limit.
    sources = ImageSources()
    return front.bind(replicas.bind(arguments), settings.body_bytes(max(sources.max_bytes, sources.max_video_bytes)))
