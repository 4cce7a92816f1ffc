"""What an application of replicas is told when it is deployed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jpaged.server.access import read_keys
from jpaged.server.settings import ServerSettings

LEAST_NUM_SEQS = 64
"""Sequences that an engine runs at once on the least of devices, where nothing is asked for."""


class RayArguments(BaseModel):
    """Arguments of `app`. Unknown ones are refused.

    Attributes:
        model: what `AsyncLLM` takes as a model.
        engine: further arguments of `AsyncLLM`, by their names.
        server: further settings of each replica's server, by the names of `ServerSettings`; not `state_dir`. Without
            keys and without `allow_anonymous` the server answers the Host names of this machine only.
        api_keys_file: file of keys, as for `jpaged serve`; every node has to have it. Rates and shares of a key hold at
            each replica by itself.
        warmup: whether a replica compiles every shape before it takes requests.
        min_replicas, max_replicas: bounds of the number of replicas; equal ones switch autoscaling off.
        target_ongoing_requests: requests a replica should have; more start another replica, fewer end one. By default
            three quarters of the engine's `max_num_seqs`, or of 64 where `engine` does not say.
        upscale_delay_s, downscale_delay_s: seconds that it has to be so before a replica starts, or ends.
        fronts: processes that take requests and send them to replicas. Each remembers prefixes by itself.
        routing: "prefix" sends a prompt to the replica that holds its prefix unless that one is overloaded; "load"
            sends it to the less busy of two drawn at random, whatever they hold.
        overload: requests that a replica may have more than the least busy one before prompts whose prefix it holds
            go elsewhere. By default half of the engine's `max_num_seqs`, or 32.
        prefix_chunks: chunks of 256 bytes of prompts that a front remembers for each replica.
        resources: what Ray reserves for a replica: `num_cpus`, `num_gpus`, `resources` ({"TPU": 4}) and what else
            `ray_actor_options` takes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    engine: dict[str, Any] = Field(default_factory=dict)
    server: dict[str, Any] = Field(default_factory=dict)
    api_keys_file: Path | None = None
    warmup: bool = True
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    target_ongoing_requests: float | None = Field(default=None, gt=0)
    upscale_delay_s: float = Field(default=30.0, ge=0)
    downscale_delay_s: float = Field(default=600.0, ge=0)
    fronts: int = Field(default=1, ge=1)
    routing: Literal["prefix", "load"] = "prefix"
    overload: int | None = Field(default=None, ge=0)
    prefix_chunks: int = Field(default=65536, ge=1)
    resources: dict[str, Any] = Field(default_factory=lambda: {"num_cpus": 1})

    @model_validator(mode="after")
    def _check(self) -> RayArguments:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas={self.max_replicas} must be at least min_replicas={self.min_replicas}")
        if "state_dir" in self.server:
            raise ValueError("server has state_dir, and the replicas of one application would write the same folder")
        self.settings()
        return self

    @property
    def max_num_seqs(self) -> int:
        """Return how many sequences a replica's engine runs at once, as far as that is known before it is there."""
        return self.engine.get("max_num_seqs") or LEAST_NUM_SEQS

    def settings(self) -> ServerSettings:
        """Return the settings of each replica's server.

        Raises:
            ValueError: one is bad; TypeError where it is unknown.
        """
        keys = {} if self.api_keys_file is None else {"keys": read_keys(self.api_keys_file)}
        try:
            return ServerSettings(**{"model": self.model, **self.server, **keys})
        except TypeError as error:
            raise ValueError(f"server={sorted(self.server)} has what ServerSettings has not: {error}") from error
