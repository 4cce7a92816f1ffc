"""What front, router and replica say to each other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from jpaged.server.protocol.responses import keeper_of

_CHAT, _COMPLETIONS, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
REPLICA = "jpaged.replica"
"""Type of the first message of every answer: who gives it."""


@dataclass(frozen=True)
class Hint:
    """What the router is told of a request; it is the first argument of the call that the router sends on.

    Attributes:
        chain: names of the prompt's beginnings (`prefix_chain`).
        avoid: replicas that refused the request or ended with it; one of them gets it only where there is no other.
        only: the replica that is to get it; None = whichever. Where it is not there another one gets it.
    """

    chain: tuple[bytes, ...] = ()
    avoid: frozenset[str] = frozenset()
    only: str | None = None


@dataclass(frozen=True)
class Need:
    """What a request needs of replicas.

    Attributes:
        replica: the one that keeps the response which the request is about; None = any will do.
        field: what names the response, "response_id" or "previous_response_id"; None = nothing does.
    """

    replica: str | None = None
    field: str | None = None


def need_of(path: str, body: bytes) -> Need:
    """Return what a request needs. One that is wrong needs nothing: a replica is to say so."""
    if path.startswith(f"{_RESPONSES}/"):
        return Need(keeper_of(path[len(_RESPONSES) + 1 :].partition("/")[0]), "response_id")
    if path != _RESPONSES:
        return Need()
    try:
        fields = from_json(body)
    except ValueError:
        return Need()
    if not isinstance(fields, dict):
        return Need()
    before = fields.get("previous_response_id")
    return Need(keeper_of(before), "previous_response_id") if isinstance(before, str) else Need()


CHUNK = 256
"""Bytes of a prompt's text in one link of its chain: two to four blocks of 16 tokens, by the language."""
MAX_CHUNKS = 2048
"""Links of the longest chain; what stands behind them routes no request."""
PATHS = frozenset({_CHAT, _COMPLETIONS, _RESPONSES})
"""Paths whose bodies have a prompt."""


def prefix_chain(path: str, body: bytes, owner: str = "") -> tuple[bytes, ...]:
    """Return one name for each beginning of the body's prompt that is a whole number of chunks long, shortest first.

    Two chains have the same first k names where the first k chunks of both prompts, owners and salts are the same. A
    body that is no request has an empty chain; whether it is refused is the replica's to say.

    Args:
        path: HTTP's path.
        body: JSON.
        owner: cached prefixes of two owners are never shared; the caller's key, say.
    """
    if path not in PATHS:
        return ()
    try:
        fields = from_json(body)
    except ValueError:
        return ()
    if not isinstance(fields, dict):
        return ()
    text = b"".join(_pieces(path, fields))
    digest = hashlib.blake2b(to_json([owner, fields.get("cache_salt"), fields.get("model")]), digest_size=16).digest()
    chain = []
    for end in range(CHUNK, min(len(text), CHUNK * MAX_CHUNKS) + 1, CHUNK):
        digest = hashlib.blake2b(digest + text[end - CHUNK : end], digest_size=16).digest()
        chain.append(digest)
    return tuple(chain)


def _pieces(path: str, fields: dict[str, Any]) -> Iterator[bytes]:
    """Yield the prompt in the order in which a chat template writes it: tools, then each message."""
    if path == _COMPLETIONS:
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]  # of several prompts the first decides
        yield from _items(prompt)
        return
    yield from _items(fields.get("tools"))
    if path == _RESPONSES:
        yield from _items(fields.get("instructions"))
    yield from _items(fields.get("messages" if path == _CHAT else "input"))


def _items(value: Any) -> Iterator[bytes]:
    """Yield a text as it is and a list item by item, so that a longer list begins like a shorter one."""
    if isinstance(value, str):
        yield value.encode("utf-8", "surrogatepass")
    elif isinstance(value, list):
        for item in value:
            yield to_json(item) + b"\n"
