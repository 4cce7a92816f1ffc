"""Sends one request to an OpenAI-compatible server and times the parts of its answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import httpx

from jpaged.bench.load import Ask

Endpoint = Literal["chat", "completions"]

_PARTS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Fields of a chat's delta that hold a part of the answer; vLLM calls thoughts "reasoning"."""
PATHS = {"chat": "/chat/completions", "completions": "/completions"}


@dataclass(frozen=True)
class Target:
    """The server and the model that requests are sent to.

    Attributes:
        url: the server's URL, with or without ``/v1``.
        model: name of the model.
        endpoint: "chat" or "completions".
        api_key: sent as a bearer token; None = none.
        extra: further fields of each request's body.
    """

    url: str
    model: str
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """Return the URL up to ``/v1``."""
        url = self.url.rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of a request.

        Raises:
            ValueError: the request is a conversation, and the endpoint takes texts.
        """
        body: dict[str, Any] = {"model": self.model, "max_tokens": ask.max_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.endpoint == "chat":
            content = ask.content
            body["messages"] = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        elif isinstance(ask.content, str):
            body["prompt"] = ask.content
        else:
            raise ValueError("endpoint='completions' takes texts, and a prompt is a conversation: use 'chat'")
        return body | self.extra


@dataclass
class Answer:
    """The result of one request; times are those of `time.perf_counter`.

    Attributes:
        due: when the request was due; latencies count from here, so that a late client hides nothing.
        token_times: when each part of the answer that holds text came.
        ended: when the answer was whole.
        prompt_tokens, output_tokens: the server's counts; without them, output_tokens is the number of parts.
        error: why the answer is not whole; None = it is.
    """

    due: float
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Return the seconds to the first text."""
        return self.token_times[0] - self.due

    @property
    def latency(self) -> float:
        """Return the seconds to the end."""
        return self.ended - self.due

    @property
    def gaps(self) -> list[float]:
        """Return the seconds between a part and the next one."""
        return [b - a for a, b in pairwise(self.token_times)]

    @property
    def seconds_per_token(self) -> float:
        """Return the seconds that each token after the first took on average."""
        return (self.token_times[-1] - self.token_times[0]) / max(1, self.output_tokens - 1)

    @property
    def normalised(self) -> float:
        """Return the seconds to the end for each token of the answer (PagedAttention paper, section 6.1)."""
        return self.latency / max(1, self.output_tokens)


async def ask_one(client: httpx.AsyncClient, target: Target, ask: Ask, due: float) -> Answer:
    """Send a request and read its answer to the end; `Answer.error` holds any failure."""
    answer = Answer(due)
    try:
        async with client.stream("POST", target.base + PATHS[target.endpoint], json=target.body(ask)) as response:
            if response.status_code != 200:
                answer.error = f"HTTP {response.status_code}: {_message(await response.aread())}"
            else:
                await _read(response.aiter_lines(), answer)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        answer.error = f"{type(error).__name__}: {error}"
    except asyncio.CancelledError:
        answer.error = "cut off: the time was up"
    answer.ended = time.perf_counter()
    if answer.error is None and not answer.token_times:
        answer.error = "an answer without text"
    answer.output_tokens = answer.output_tokens or len(answer.token_times)
    return answer


async def _read(lines: AsyncIterator[str], answer: Answer) -> None:
    """Read the events of a stream; the answer is whole when ``[DONE]`` has come."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            answer.error = f"an event that is not JSON: {data[:80]}"
            return
        if not isinstance(event, dict):
            answer.error = f"an event that is no object: {data[:80]}"
            return
        if event.get("error"):
            answer.error = f"in the stream: {_message(data.encode())}"
            return
        choices = event.get("choices")
        if isinstance(choices, list) and any(_has_text(choice) for choice in choices):
            answer.token_times.append(time.perf_counter())
        if isinstance(usage := event.get("usage"), dict):
            answer.prompt_tokens = usage.get("prompt_tokens") or 0
            answer.output_tokens = usage.get("completion_tokens") or 0
    answer.error = "the stream ended before [DONE]"


def _has_text(choice: Any) -> bool:
    """Tell whether a choice of an event holds a part of the answer."""
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    return bool(choice.get("text")) or any(map(delta.get, _PARTS))


def _message(body: bytes) -> str:
    """Return an error's message as one line."""
    text = body.decode("utf-8", "replace")
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(text.split())[:160]


async def first_model(client: httpx.AsyncClient, target: Target) -> str:
    """Return the model that the server names first.

    Raises:
        ValueError: the server does not answer, or has no model.
    """
    try:
        response = await client.get(f"{target.base}/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"--url {target.url} names no model ({error}); give --model") from error
