"""Arguments of the application, checked when it is deployed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jpaged.answers.rows import NO_FORMAT, given_format
from jpaged.server.access import read_keys
from jpaged.server.settings import ServerSettings

LEAST_NUM_SEQS = 64
"""Default of `max_num_seqs` on the smallest device."""


_FORMATS = ("tool_parser", "reasoning_parser")


class RayArguments(BaseModel):
    """Arguments of `app`. Unknown ones are refused.

    Attributes:
        model: the model, as `AsyncLLM` takes it.
        engine: further arguments of `AsyncLLM`, by their names.
        server: further settings of each replica's server, by the names of `ServerSettings`, except `state_dir`. Formats
            of tool calls and thoughts are found in the model, unless `tool_parser` and `reasoning_parser` name them or
            ``none``. Without keys and without `allow_anonymous` the server accepts only this machine's Host names.
        api_keys_file: file of keys, as for `jpaged serve`; every node needs it. Rates and shares of a key apply at each
            replica separately.
        warmup: whether a replica compiles every shape before it accepts requests.
        min_replicas, max_replicas: limits on the number of replicas; equal ones disable autoscaling.
        target_ongoing_requests: requests per replica at which autoscaling aims. By default three quarters of the
            engine's `max_num_seqs`, or of 64 if `engine` does not set it.
        upscale_delay_s, downscale_delay_s: seconds of more, or fewer, requests before a replica starts, or ends.
        fronts: processes that take requests and send them to replicas. Each has its own record of prefixes.
        routing: "prefix" sends a prompt to the replica that holds its prefix, unless that replica is overloaded; "load"
            sends it to the less busy of two random replicas.
        overload: a replica with this many more requests than the least busy one gets no prompts for its prefixes. By
            default half of the engine's `max_num_seqs`, or 32.
        prefix_chunks: chunks of 256 bytes of prompts that a front records for each replica.
        resources: a replica's share of the cluster: `num_cpus`, `num_gpus`, `resources` ({"TPU": 4}) and the other
            `ray_actor_options`.
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

    @property
    def follows_caches(self) -> bool:
        """Tell whether replicas report what their caches have, for routing by prefix."""
        return self.routing == "prefix" and self.engine.get("enable_prefix_caching", True) is not False

    @model_validator(mode="after")
    def _check(self) -> RayArguments:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas={self.max_replicas} must be at least min_replicas={self.min_replicas}")
        if "state_dir" in self.server:
            raise ValueError("server has state_dir, but the replicas of one application would write to the same folder")
        self.settings()
        return self

    @property
    def max_num_seqs(self) -> int:
        """Return how many sequences a replica's engine runs at once, or an estimate before it exists."""
        return self.engine.get("max_num_seqs") or LEAST_NUM_SEQS

    @property
    def formats(self) -> dict[str, str]:
        """Return the answer formats that `server` names; each replica finds the others in its model."""
        return {name: self.server[name] or NO_FORMAT for name in _FORMATS if name in self.server}

    def settings(self) -> ServerSettings:
        """Return the settings of each replica's server.

        Raises:
            ValueError: a setting is invalid or unknown.
        """
        keys = {} if self.api_keys_file is None else {"keys": read_keys(self.api_keys_file)}
        named = {name: given_format(row) for name, row in self.formats.items()}
        try:
            return ServerSettings(**{"model": self.model, **self.server, **named, **keys})
        except TypeError as error:
            raise ValueError(f"server={sorted(self.server)} has a name that ServerSettings lacks: {error}") from error
