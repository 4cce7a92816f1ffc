"""Layers that keep a fixed number of tokens, whatever the sequence's length (PyramidKV)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.memory.policies.attention import leading_hits
from jpaged.memory.policies.base import UNBOUNDED, Policy


@dataclass(frozen=True)
class TokenBudget(Policy):
    """The first `sink` tokens, the last `recent` and, of those between, the `top` with the highest attention scores.

    Up to `budget` tokens this is full attention. Then the table stays as it is: the device writes each new token
    over one it no longer keeps, in whatever block that is. So from there on every step may write every block,
    a forked sequence copies them all, and nothing is a prefix that another request could use.

    Raises:
        ValueError: when a number is negative, or `recent` is 0 (a new token is always kept).
    """

    sink: int
    recent: int
    top: int

    def __post_init__(self) -> None:
        for name, least in (("sink", 0), ("recent", 1), ("top", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least} tokens")

    @property
    def budget(self) -> int:
        """Return how many tokens are kept."""
        return self.sink + self.recent + self.top

    def num_blocks(self, length: int, block_size: int) -> int:
        return -(-min(length, self.budget) // block_size)

    def active_blocks(self, length: int, block_size: int) -> tuple[range, ...]:
        return (range(self.num_blocks(length, block_size)),)

    def possible_prefix(self, is_hit: Sequence[bool], block_size: int) -> Sequence[int]:
        return range(min(leading_hits(is_hit), self.budget // block_size) + 1)

    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        return self.num_blocks(length, block_size)

    def capacity(self, num_blocks: int, block_size: int, num_slots: int) -> int:
        # The first step beyond the budget has to be allocated: it takes shared blocks' copies and forgets hashes.
        return UNBOUNDED if num_slots > self.budget else min(self.budget, num_blocks * block_size)

    def written_blocks(self, start: int, stop: int, block_size: int) -> range:
        if stop > self.budget:
            return range(self.num_blocks(stop, block_size)) if start < stop else range(0)
        return super().written_blocks(start, stop, block_size)

    def full_blocks(self, num_known: int, num_computed: int, block_size: int) -> int:
        return 0 if num_computed > self.budget else min(num_known, self.budget) // block_size

    def filled_tokens(self, block: int, length: int, block_size: int) -> int:
        return super().filled_tokens(block, min(length, self.budget), block_size)
