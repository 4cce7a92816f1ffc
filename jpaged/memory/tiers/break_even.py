"""Tells from measurements whether reading blocks from a tier is faster than computing their tokens again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median

STEPS = 32
"""Steps with prompts whose times count; the median leaves out those that had to compile."""

LEAST_STEPS = 3
"""Steps after which the median is trusted."""

NEWEST_READ = 0.1
"""Weight of the newest read among all that were timed."""

LONGEST = 1 << 20
"""Prefix, in tokens, beyond which no break-even is looked for."""


class BreakEven:
    """Weighs the time of loading, ``latency + bytes / rate + bytes / device rate``, against that of computing tokens.

    Args:
        latency: seconds from asking for a block to its first bytes.
        read_rate: bytes a second that a read brings, checksum included.
        device_rate: bytes a second that the devices take from the host; infinite = the transfer does not count.
        min_tokens: fewest tokens that are read, regardless of measurements; None = measurements decide.
    """

    def __init__(
        self, *, latency: float, read_rate: float, device_rate: float = math.inf, min_tokens: int | None = None
    ) -> None:
        self.latency = latency
        self.min_tokens = min_tokens
        self._seconds_per_byte = 1 / read_rate
        self._transfer = 1 / device_rate
        self._steps: deque[float] = deque(maxlen=STEPS)

    @property
    def read_rate(self) -> float:
        """Return the bytes a second that a read brings, as measured so far."""
        return 1 / self._seconds_per_byte

    @property
    def seconds_per_token(self) -> float | None:
        """Return the time in which a token of a prompt is computed; None while too few steps were timed."""
        return median(self._steps) if len(self._steps) >= LEAST_STEPS else None

    def computed(self, tokens: int, seconds: float) -> None:
        """Learn from a step with prompts."""
        self._steps.append(seconds / tokens)

    def read(self, num_bytes: int, seconds: float) -> None:
        """Learn from a read; one that took hardly longer than the latency says nothing about the rate."""
        if num_bytes and seconds > 2 * self.latency:
            newest = (seconds - self.latency) / num_bytes
            self._seconds_per_byte += NEWEST_READ * (newest - self._seconds_per_byte)

    def read_seconds(self, num_bytes: int) -> float:
        """Return how long a read of so many bytes is expected to take, transfer to the devices included."""
        return self.latency + num_bytes * (self._seconds_per_byte + self._transfer)

    def is_worth(self, tokens: int, num_bytes: int) -> bool:
        """Tell whether so many bytes should be read rather than so many tokens computed."""
        if self.min_tokens is not None:
            return tokens >= self.min_tokens
        computing = self.seconds_per_token
        return computing is not None and self.read_seconds(num_bytes) < tokens * computing

    def tokens(self, step: int, num_bytes: Callable[[int], int]) -> int | None:
        """Return the shortest prefix worth reading, in tokens; None where there is none, or nothing is known yet.

        Args:
            step: number of tokens of which every prefix is a multiple.
            num_bytes: tells the size of a prefix of so many tokens.
        """
        longest = step
        while not self.is_worth(longest, num_bytes(longest)):
            longest *= 2
            if longest > max(LONGEST, step):
                return None
        low, high = longest // 2 // step, longest // step  # in steps; `low` is not worth it, `high` is
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.is_worth(middle * step, num_bytes(middle * step)) else (middle, high)
        return high * step
