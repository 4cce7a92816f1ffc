"""The caller of an HTTP request: its id, key and time, and the fields of its line in the log."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from jpaged import BeamSearchParams, RequestOutput, SamplingParams
from jpaged.server.access import Key

STATE = "jpaged_caller"
"""Key of the caller in an ASGI scope's state."""
AGAIN = "again-"
"""Prefix of the engine's ids for requests that a client may send again after a restart."""


@dataclass(eq=False)
class Caller:
    """One HTTP request and its sender.

    Attributes:
        request_id: the client's X-Request-Id, or a new one.
        answer_id: the part of an answer's ids that no other answer has. A gateway may repeat an X-Request-Id.
        key: the key that it sent; None on a server without keys.
        idempotency_key: the client's Idempotency-Key, which lets it send the request again after a restart.
        arrived: time of its arrival, of `time.monotonic`.
        trace_headers: the W3C headers that make its spans part of the client's trace.
        deadline: time on the event loop's clock by which it has to end; None: no limit.
        ping_interval: seconds of silence after which its stream has a ping; None: it has none.
        num_prompts: the requests to the engine that it consists of.
        taken: set once the engine has taken all of them.
        log: further fields of its line in the log; never a prompt.
        num_prompt_tokens, num_output_tokens: tokens of its requests at the engine.
    """

    request_id: str
    key: Key | None = None
    answer_id: str = ""
    idempotency_key: str | None = None
    arrived: float = field(default_factory=time.monotonic)
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    deadline: float | None = None
    ping_interval: float | None = None
    num_prompts: int = 1
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    log: dict[str, Any] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    _repeats: Counter[str] = field(default_factory=Counter)
    _num_taken: int = 0

    def __post_init__(self) -> None:
        self.answer_id = self.answer_id or self.request_id

    def engine_name(
        self, prompt: Mapping[str, Any], params: SamplingParams | BeamSearchParams, adapter: str | None = None
    ) -> str:
        """Return the engine's id for a request: the same for the same prompt, parameters, adapter, Idempotency-Key and
        key of the server."""
        if self.idempotency_key is None:
            return f"{self.request_id}-{uuid.uuid4().hex[:12]}"
        owner = "" if self.key is None else self.key.name
        named = () if adapter is None else (adapter,)
        asked = repr((owner, self.idempotency_key, sorted(prompt.items()), params, *named))
        digest = hashlib.sha256(asked.encode("utf-8", "surrogatepass")).hexdigest()
        self._repeats[digest] += 1  # one body may contain the same prompt twice
        return f"{AGAIN}{digest}-{self._repeats[digest]}"

    def salted(self, salt: str | None) -> str | None:
        """Return the salt of a prompt's cached prefixes: the request's own, combined with its key's."""
        if self.key is None:
            return salt
        own = self.key.salt if salt is None else f"{self.key.salt}\0{salt}"
        return hashlib.sha256(own.encode()).hexdigest()

    def take(self) -> None:
        """Note that the engine has taken one of its requests."""
        self._num_taken += 1
        if self._num_taken >= self.num_prompts:
            self.taken.set()

    def count(self, output: RequestOutput, num_tokens: int) -> None:
        """Count the prompt and output tokens of a finished request of the engine."""
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_output_tokens += num_tokens
        self.log["prompt_tokens"], self.log["output_tokens"] = self.num_prompt_tokens, self.num_output_tokens


def caller_of(request: Request) -> Caller:
    """Return the caller that `RequestMiddleware` stored."""
    return request.scope["state"][STATE]
