"""Who asks: the request's id, key and time, and what the log will say of it."""

from __future__ import annotations

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
"""Place in an ASGI scope's state."""
AGAIN = "again-"
"""Begins the names of those requests of the engine that a client may ask for again."""


@dataclass(eq=False)
class Caller:
    """One HTTP request and who sent it.

    Attributes:
        request_id: the client's X-Request-Id, or one of the server's.
        key: the key that it brought; None where the server has none.
        idempotency_key: the client's Idempotency-Key, by which it may ask again after the server was killed.
        arrived: time of `time.monotonic` when it came.
        trace_headers: the W3C headers by which its spans become part of the client's trace.
        deadline: time of the event loop's clock when it has to have ended; None = whenever it does.
        log: what the request's line in the log says beside status and time; never a prompt.
        num_prompt_tokens, num_output_tokens: tokens of the requests that it made of the engine.
    """

    request_id: str
    key: Key | None = None
    idempotency_key: str | None = None
    arrived: float = field(default_factory=time.monotonic)
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    deadline: float | None = None
    log: dict[str, Any] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    _asked: Counter[str] = field(default_factory=Counter)

    def engine_name(
        self, prompt: Mapping[str, Any], params: SamplingParams | BeamSearchParams, adapter: str | None = None
    ) -> str:
        """Return the engine's name for a request. The same prompt, parameters and adapter under the same
        Idempotency-Key, asked with the same key of the server, have the same one."""
        if self.idempotency_key is None:
            return f"{self.request_id}-{uuid.uuid4().hex[:12]}"
        whose = "" if self.key is None else self.key.name
        named = () if adapter is None else (adapter,)
        asked = repr((whose, self.idempotency_key, sorted(prompt.items()), params, *named))
        digest = hashlib.sha256(asked.encode("utf-8", "surrogatepass")).hexdigest()
        self._asked[digest] += 1  # the same prompt may stand in one body twice
        return f"{AGAIN}{digest}-{self._asked[digest]}"

    def salted(self, salt: str | None) -> str | None:
        """Return the salt of a prompt's cached prefixes: the request's own within its key's."""
        if self.key is None:
            return salt
        own = self.key.salt if salt is None else f"{self.key.salt}\0{salt}"
        return hashlib.sha256(own.encode()).hexdigest()

    def count(self, output: RequestOutput, num_tokens: int) -> None:
        """Count what a finished request of the engine took: its prompt, and the tokens that it got."""
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_output_tokens += num_tokens
        self.log["prompt_tokens"], self.log["output_tokens"] = self.num_prompt_tokens, self.num_output_tokens


def caller_of(request: Request) -> Caller:
    """Return the caller that the server's outermost layer wrote down."""
    return request.scope["state"][STATE]
