"""The usage and the ending of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jpaged import CompletionOutput, __version__
from jpaged.server.cache_use import details

FINGERPRINT = f"jpaged-{__version__}"


def ending(output: CompletionOutput) -> dict[str, Any]:
    """Return the fields of an output's end; `stop_reason` is vLLM's."""
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}


class Usage:
    """Counts the tokens of an answer. A prompt's tokens count once, however many outputs it has.

    Args:
        include: whether a stream's last chunk has the usage.
        continuous: whether every chunk has it.

    Attributes:
        thought: tokens of thoughts so far; None if thoughts are not split off.
    """

    def __init__(self, *, include: bool = False, continuous: bool = False) -> None:
        self.include = include
        self.continuous = continuous and include
        self._prompts: dict[int, tuple[int, int, Mapping[str, int]]] = {}
        self._tokens = 0
        self.thought: int | None = None

    def count(
        self, prompt: int, prompt_tokens: int, cached_tokens: int, new_tokens: int, by_tier: Mapping[str, int]
    ) -> None:
        """Count the tokens of a prompt, by its number, and the new ones of its outputs; `by_tier`: see `CacheUse`."""
        self._prompts[prompt] = prompt_tokens, cached_tokens, by_tier
        self._tokens += new_tokens

    def now(self) -> dict[str, Any]:
        """Return the `usage` so far."""
        prompt = sum(tokens for tokens, _, _ in self._prompts.values())
        found: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": self._tokens,
            "total_tokens": prompt + self._tokens,
            "prompt_tokens_details": details(
                sum(cached for _, cached, _ in self._prompts.values()), (tiers for *_, tiers in self._prompts.values())
            ),
        }
        if self.thought is not None:
            found["completion_tokens_details"] = {"reasoning_tokens": self.thought}
        return found

    def field(self) -> dict[str, Any]:
        """Return a chunk's usage field: null before the last chunk, unless every chunk has the usage."""
        if not self.include:
            return {}
        return {"usage": self.now() if self.continuous else None}


def added(counts: Iterable[int | None]) -> int | None:
    """Return the sum of the known counts; None if there is none."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
