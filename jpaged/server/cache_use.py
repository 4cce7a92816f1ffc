"""Says in an answer's usage, in all protocols, which tiers gave tokens of the prompt, and which tokens stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jpaged import PoolingRequestOutput, RequestOutput
from jpaged.server.bodies import Body

SECONDS = {"5m": 300.0, "1h": 3600.0}
"""How long a marked prefix stays, by the name of its time to live; "5m" is the default."""

MOST_MARKS = 4
"""Limit on the marked prefixes of a request, as at Anthropic's: each is looked for in the prompt."""


class CacheControl(Body):
    """Marks a prefix of the prompt that later requests begin with, so that it stays. Prefixes are cached without it
    too."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        """Return how long the prefix stays."""
        return SECONDS[self.ttl or "5m"]


@dataclass(frozen=True)
class CacheUse:
    """What one prompt took from the prefix cache and left in it.

    Attributes:
        by_tier: cached tokens from each tier; empty where all are the pool's.
        written: tokens that were computed and stay for a time, by the seconds.
    """

    by_tier: Mapping[str, int] = field(default_factory=dict)
    written: Mapping[float, int] = field(default_factory=dict)

    @classmethod
    def of(cls, output: RequestOutput) -> CacheUse:
        """Return that of an output of the engine."""
        if not (output.num_cached_by_tier or output.kept_prefixes):
            return NO_USE
        written: dict[float, int] = {}
        at = output.num_cached_tokens
        for tokens, seconds in sorted(output.kept_prefixes):
            if tokens > at:
                written[seconds] = written.get(seconds, 0) + tokens - at
                at = tokens
        return cls(split(output), written)


NO_USE = CacheUse()


def split(output: RequestOutput | PoolingRequestOutput[Any]) -> dict[str, int]:
    """Return the cached tokens of a prompt by where they were; empty where all were in the pool."""
    tiers = output.num_cached_by_tier
    return {"pool": output.num_cached_tokens - sum(tiers.values()), **tiers} if tiers else {}


def details(cached: int, by_tier: Iterable[Mapping[str, int]]) -> dict[str, Any]:
    """Return the field of OpenAI's usage that says which tokens of some prompts were cached.

    Args:
        by_tier: those of each prompt that has some from another tier than the pool; other prompts' are the pool's.
    """
    found: dict[str, int] = {}
    for one in by_tier:
        for name, tokens in one.items():
            found[name] = found.get(name, 0) + tokens
    if not found:
        return {"cached_tokens": cached}
    found["pool"] += cached - sum(found.values())
    return {"cached_tokens": cached, "cached_tokens_by_tier": found}
