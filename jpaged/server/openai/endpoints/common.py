"""Helpers of several endpoints: the usage and the ending of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jpaged import CompletionOutput, RequestOutput, __version__

FINGERPRINT = f"jpaged-{__version__}"


def usage(outputs: Sequence[RequestOutput], completion_tokens: int, thought: int | None = None) -> dict[str, Any]:
    """Return the `usage` of an answer. A prompt's tokens count once, however many outputs it has.

    Args:
        thought: tokens of thoughts among `completion_tokens`; None if thoughts are not split off.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }
    if thought is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": thought}
    return found


def ending(output: CompletionOutput) -> dict[str, Any]:
    """Return the fields of an output's end; `stop_reason` is vLLM's."""
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}


class StreamUsage:
    """Counts the tokens of a stream.

    Args:
        include: whether a last chunk has the usage.
        continuous: whether every chunk has it.

    Attributes:
        thought: tokens of thoughts so far; None if thoughts are not split off.
    """

    def __init__(self, *, include: bool, continuous: bool) -> None:
        self.include = include
        self.continuous = continuous and include
        self._seen: dict[int, RequestOutput] = {}
        self._tokens = 0
        self.thought: int | None = None

    def count(self, prompt: int, output: RequestOutput) -> None:
        """Count the new tokens of a prompt."""
        self._seen[prompt] = output
        for each in output.outputs:
            self._tokens += len(each.token_ids)

    def now(self) -> dict[str, Any]:
        """Return the `usage` so far."""
        return usage(list(self._seen.values()), self._tokens, self.thought)

    def field(self) -> dict[str, Any]:
        """Return a chunk's usage field: null before the last chunk, unless every chunk has the usage."""
        if not self.include:
            return {}
        return {"usage": self.now() if self.continuous else None}


def added(counts: Iterable[int | None]) -> int | None:
    """Return the sum of the known counts; None if there is none."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
