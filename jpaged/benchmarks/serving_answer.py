"""Holds the times of one answer, from which all latencies of the serving benchmarks follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Answer:
    """What came of one request; times are those of `time.perf_counter`.

    Attributes:
        due: when it was to be sent; latencies count from here, so that a late client hides nothing.
        token_times: when each part of the answer that holds text came.
        ended: when the answer was whole.
        prompt_tokens, output_tokens: as the server counts them; without its count the parts are counted.
        error: why there is no whole answer.
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
        """Return the seconds that each token behind the first took on average."""
        return (self.token_times[-1] - self.token_times[0]) / max(1, self.output_tokens - 1)

    @property
    def normalised(self) -> float:
        """Return the seconds to the end for each token of the answer (PagedAttention paper, section 6.1)."""
        return self.latency / max(1, self.output_tokens)
