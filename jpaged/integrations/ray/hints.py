"""Makes the hint by which the router chooses a replica: the prompt's prefixes, and the replica that a request needs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from jpaged.server.openai.bodies.responses import keeper_of
from jpaged.server.protocols import protocol_of

_RESPONSES = "/v1/responses"
REPLICA = "jpaged.replica"
"""Type of the first message of every answer, with the replica's name."""


@dataclass(frozen=True)
class Hint:
    """Routing information of a request, and the first argument of the call that the router forwards.

    Attributes:
        chain: hashes of the prompt's prefixes (`prefix_chain`).
        avoid: replicas that refused the request or ended with it, used only if there is no other.
        only: the replica that should get it; None: any. If that replica is gone, another one gets it.
    """

    chain: tuple[bytes, ...] = ()
    avoid: frozenset[str] = frozenset()
    only: str | None = None


@dataclass(frozen=True)
class Need:
    """The replica that a request needs.

    Attributes:
        replica: the one that stores the response of the request; None: any.
        field: the field with the response's id, "response_id" or "previous_response_id"; None: no response.
    """

    replica: str | None = None
    field: str | None = None


def need_of(path: str, body: bytes) -> Need:
    """Return the replica that a request needs. An invalid request needs none: any replica can refuse it."""
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
"""Bytes of a prompt's text in one link of its chain: two to four blocks of 16 tokens, depending on the language."""
MAX_CHUNKS = 2048
"""Limit on the links of a chain; text after them does not influence routing."""


def prefix_chain(path: str, body: bytes, owner: str = "") -> tuple[bytes, ...]:
    """Return one hash for each prefix of the body's prompt that is a whole number of chunks, shortest first.

    Two chains share their first k hashes if the first k chunks of both prompts, the owners and the salts are equal. An
    invalid body has an empty chain: any replica can refuse it.

    Args:
        path: HTTP path.
        body: JSON.
        owner: the caller's key; cached prefixes of two owners are never shared.
    """
    prompt = protocol_of(path).prompts.get(path)
    if prompt is None:
        return ()
    try:
        fields = from_json(body)
    except ValueError:
        return ()
    if not isinstance(fields, dict):
        return ()
    text = b"".join(piece for part in prompt(fields) for piece in _items(part))
    digest = hashlib.blake2b(to_json([owner, fields.get("cache_salt"), fields.get("model")]), digest_size=16).digest()
    chain = []
    for end in range(CHUNK, min(len(text), CHUNK * MAX_CHUNKS) + 1, CHUNK):
        digest = hashlib.blake2b(digest + text[end - CHUNK : end], digest_size=16).digest()
        chain.append(digest)
    return tuple(chain)


def _items(value: Any) -> Iterator[bytes]:
    """Yield a text, or a list item by item, so that a longer list begins like a shorter one."""
    if isinstance(value, str):
        yield value.encode("utf-8", "surrogatepass")
    elif isinstance(value, list):
        for item in value:
            yield to_json(item) + b"\n"
