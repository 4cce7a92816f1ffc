"""A cluster of Ray on this machine, with an application of replicas behind a port of its own."""

from __future__ import annotations

import os
import socket
import time

import httpx

SECONDS = 120
"""For what takes moments; a busy machine may take long."""


def start_ray(num_cpus=2):
    """Start a cluster without a dashboard, which tells nobody of it and writes nothing into the user's home."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray

    ray.init(num_cpus=num_cpus, include_dashboard=False, object_store_memory=2**27, log_to_driver=False)
    return ray


class Cluster:
    """Runs one application at a time; `stop` ends all processes."""

    def __init__(self):
        self._ray = start_ray()
        from ray import serve

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._serve = serve
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        self.url = f"http://127.0.0.1:{port}"

    def deploy(self, arguments):
        """Run the application, and wait until all replicas have answered its front: Serve tells it of them later."""
        from jpaged.integrations.ray import app

        self._serve.run(app(arguments))
        until(lambda: list(self.health()["replicas"].values()).count("ok") >= arguments.min_replicas)

    def health(self):
        return httpx.get(self.url + "/health", timeout=SECONDS).json()

    def num_running(self):
        deployment = self._serve.status().applications["default"].deployments["replica"]
        return deployment.replica_states.get("RUNNING", 0)

    def _actor(self, replica):
        return self._ray.get_actor(f"SERVE_REPLICA::default#replica#{replica}", namespace="serve")

    def ongoing(self, replica):
        """Return how many requests a replica has, as its router asks it."""
        return self._ray.get(self._actor(replica).get_num_ongoing_requests.remote())

    def kill(self, replica):
        self._ray.kill(self._actor(replica))

    def stop(self):
        self._serve.shutdown()
        self._ray.shutdown()

    def post(self, body, path="/v1/completions", **options):
        return httpx.post(self.url + path, json=body, timeout=SECONDS, **options)


def until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.05)
