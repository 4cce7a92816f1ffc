"""What a layer group needs to keep: one small class for each kind of layer (Jenga, section 5).

A policy answers in logical blocks of its group: block ``i`` covers tokens ``[i * size, (i + 1) * size)``. It holds
no state of a sequence: whatever depends on one comes in through ``length`` or ``is_hit``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass


class Policy(ABC):
    """The life of a block in one kind of layer.

    Two rules let the manager stay incremental: a block that has become inactive never becomes active again as
    the sequence grows, and the block that holds position ``length`` is active while it is partly filled.
    """

    def num_blocks(self, length: int, block_size: int) -> int:
        """Entries in the block table of a sequence of `length` tokens."""
        return -(-length // block_size)

    def capacity(self, num_blocks: int, block_size: int) -> int:
        """The longest sequence, in tokens, that a table of `num_blocks` entries serves."""
        return num_blocks * block_size

    @abstractmethod
    def active_blocks(self, length: int, block_size: int) -> tuple[range, ...]:
        """Ascending, disjoint runs of blocks that the token at position `length` and all later ones may read.

        Everything else may be released; after a prefix hit of `length` tokens, exactly these are attached
        and so touched (Jenga's balanced eviction: a group touches only what it would need again).
        """

    @abstractmethod
    def possible_prefix(self, is_hit: Sequence[bool], block_size: int) -> Collection[int]:
        """Prefix lengths in blocks, 0 among them, that can be served when the blocks in `is_hit` are cached."""

    @abstractmethod
    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        """Most blocks held at once while `length` tokens are computed, at most `step_tokens` in one step."""


@dataclass(frozen=True)
class FullAttention(Policy):
    """Every token reads all before it: nothing is ever released, a prefix is valid up to the first miss."""

    def active_blocks(self, length: int, block_size: int) -> tuple[range, ...]:
        return (range(-(-length // block_size)),)

    def possible_prefix(self, is_hit: Sequence[bool], block_size: int) -> Collection[int]:
        first_miss = next((i for i, hit in enumerate(is_hit) if not hit), len(is_hit))
        return range(first_miss + 1)

    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        return -(-length // block_size)


@dataclass(frozen=True)
class SlidingWindow(Policy):
    """Every token reads the last `window` tokens, itself included: blocks behind the window are released.

    Raises:
        ValueError: when `window` is not positive.
    """

    window: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1 token")

    def _first_active(self, length: int, block_size: int) -> int:
        return max(0, length - self.window + 1) // block_size

    def active_blocks(self, length: int, block_size: int) -> tuple[range, ...]:
        return (range(self._first_active(length, block_size), -(-length // block_size)),)

    def possible_prefix(self, is_hit: Sequence[bool], block_size: int) -> Collection[int]:
        lengths = {0}
        run = 0  # consecutive hits that end at block `blocks - 1`
        for blocks, hit in enumerate(is_hit, start=1):
            run = run + 1 if hit else 0
            if run >= blocks - self._first_active(blocks * block_size, block_size):
                lengths.add(blocks)
        return lengths

    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        # The tokens of one step and the window behind the first of them, wherever the block borders fall.
        span = min(length, self.window - 1 + step_tokens)
        return min(-(-length // block_size), -(-(span - 1) // block_size) + 1)
