"""Self-attention: every token reads all before it, or those near it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from jpaged.memory.policies.base import Policy


@dataclass(frozen=True)
class FullAttention(Policy):
    """Every token reads all before it: nothing is ever released, a prefix is valid up to the first miss."""

    releases: ClassVar[bool] = False
    appends: ClassVar[bool] = True

    def active_blocks(self, length: int, block_size: int) -> tuple[range, ...]:
        return (range(-(-length // block_size)),)

    def possible_prefix(self, is_hit: Sequence[bool], block_size: int) -> Sequence[int]:
        return range(leading_hits(is_hit) + 1)

    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        return -(-length // block_size)


class LocalAttention(Policy):
    """A token reads back to some position that never moves left: blocks before it are released.

    Attributes:
        reach: most tokens before a token that it reads.
    """

    appends: ClassVar[bool] = True
    reach: int

    @abstractmethod
    def first_read(self, position: int) -> int:
        """Return the first position that the token at `position` reads, or `position` when it reads none before it."""

    def active_blocks(self, length: int, block_size: int) -> tuple[range, ...]:
        return (range(self.first_read(length) // block_size, -(-length // block_size)),)

    def possible_prefix(self, is_hit: Sequence[bool], block_size: int) -> Sequence[int]:
        lengths = [0]
        run = 0  # consecutive hits that end at block `blocks - 1`
        most = -(-len(is_hit) // RUNS_AT_ONCE) * RUNS_AT_ONCE
        for blocks, (hit, needed) in enumerate(zip(is_hit, _needed_runs(self, block_size, most), strict=False), 1):
            run = run + 1 if hit else 0
            if run >= needed:
                lengths.append(blocks)
        return lengths

    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        # The tokens of one step and what the first of them reads, wherever the block borders fall.
        span = min(length, self.reach + step_tokens)
        return min(-(-length // block_size), -(-(span - 1) // block_size) + 1)


RUNS_AT_ONCE = 256


@lru_cache(32)
def _needed_runs(policy: LocalAttention, block_size: int, most: int) -> list[int]:
    """Return for prefixes of one to `most` blocks how many of the last blocks are read after them."""
    return [blocks - policy.first_read(blocks * block_size) // block_size for blocks in range(1, most + 1)]


@dataclass(frozen=True)
class SlidingWindow(LocalAttention):
    """Every token reads the last `window` tokens, itself included.

    Raises:
        ValueError: when `window` is not positive.
    """

    window: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1 token")

    @property
    def reach(self) -> int:  # type: ignore[override]
        return self.window - 1

    def first_read(self, position: int) -> int:
        return max(0, position - self.window + 1)


@dataclass(frozen=True)
class ChunkedLocalAttention(LocalAttention):
    """Every token reads the tokens of its chunk (Llama 4: 8192): a chunk is released when the next begins.

    Raises:
        ValueError: when `chunk` is not positive.
    """

    chunk: int

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk={self.chunk} must be at least 1 token")

    @property
    def reach(self) -> int:  # type: ignore[override]
        return self.chunk - 1

    def first_read(self, position: int) -> int:
        return position - position % self.chunk


def leading_hits(is_hit: Sequence[bool]) -> int:
    """Return how many blocks stand before the first miss."""
    return next((i for i, hit in enumerate(is_hit) if not hit), len(is_hit))
