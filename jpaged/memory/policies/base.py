"""The interface between the memory manager and a kind of layer."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

UNBOUNDED = sys.maxsize
"""Capacity of a table that serves a sequence of any length."""


class Policy(ABC):
    """The life of a block in one kind of layer.

    A policy answers in logical blocks of its group; unless it says otherwise, block ``i`` covers tokens
    ``[i * block_size, (i + 1) * block_size)``. It holds no state of a sequence: whatever depends on one comes in
    through its arguments, or once and for all by `for_request`.

    Two rules let the manager stay incremental: a block that has become inactive never becomes active again as
    the sequence grows, and a block that will be written again is active.

    Attributes:
        names_tokens: blocks are cached under the tokens up to their end; False: under the salt and their number.
    """

    names_tokens: ClassVar[bool] = True

    def for_request(self, encoder_tokens: int, prompt_tokens: int | None = None) -> Policy:
        """The policy of a request with so many encoder tokens (image patches, audio frames) and prompt tokens, where
        these are known."""
        return self

    # Which blocks are needed.

    @abstractmethod
    def active_blocks(self, length: int, block_size: int) -> tuple[range, ...]:
        """Ascending, disjoint runs of blocks that the token at position `length` and all later ones may read.

        Everything else may be released; after a prefix hit of `length` tokens, exactly these are attached
        and so touched (Jenga's balanced eviction: a group touches only what it would need again).
        """

    @abstractmethod
    def possible_prefix(self, is_hit: Sequence[bool], block_size: int) -> Sequence[int]:
        """Prefix lengths that can be served when the blocks in `is_hit` are cached: ascending, from 0, in units of
        `alignment`."""

    @abstractmethod
    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        """Most blocks held at once while `length` tokens are computed, at most `step_tokens` in one step."""

    def alignment(self, block_size: int) -> int:
        """Every prefix length, in tokens, is a multiple of it."""
        return block_size

    def most_blocks(self, length: int, block_size: int) -> int:
        """Entries that the block table keeps once `length` tokens are computed; those behind are given up, and new
        ones may be appended in their place."""
        return UNBOUNDED

    # Where tokens lie.

    def num_blocks(self, length: int, block_size: int) -> int:
        """Entries in the block table of a sequence of `length` tokens."""
        return -(-length // block_size)

    def capacity(self, num_blocks: int, block_size: int, num_slots: int) -> int:
        """The longest sequence, in tokens, that `num_blocks` entries serve without another allocation.

        Args:
            num_slots: the length that the table was last extended to.
        """
        return num_blocks * block_size

    def written_blocks(self, start: int, stop: int, block_size: int) -> range:
        """Table entries that may change when tokens [`start`, `stop`) are computed."""
        return range(start // block_size, -(-stop // block_size)) if start < stop else range(0)

    def full_blocks(self, num_known: int, num_computed: int, block_size: int) -> int:
        """Leading blocks that can be cached: the first `num_known` tokens filled them for good, and they hold that
        still when `num_computed` tokens are computed."""
        return num_known // block_size

    def prefix_end(self, block: int, block_size: int) -> int:
        """Tokens of the prefix that ends with `block`; among blocks last needed together the longest is evicted
        first."""
        return (block + 1) * block_size

    def filled_tokens(self, block: int, length: int, block_size: int) -> int:
        """Of the `block_size` tokens in a block, how many hold something when `length` are computed."""
        return min(block_size, max(0, length - block * block_size))
