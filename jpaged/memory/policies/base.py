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
        names_tokens: whether blocks are cached under the tokens up to their end; False: under the salt and their
            number.
        reads_encoder: whether the sequence's table has blocks of the request's encoder tokens.
        releases: whether a sequence may release blocks while it grows; False spares the question after every block.
        appends: whether the table has a block in every entry, entry ``i`` is that of tokens
            ``[i * block_size, (i + 1) * block_size)``, and only their own computation writes to it; True spares the
            questions where tokens lie.
        prompt_tail: number of a prompt's last tokens that one step has to compute together, without any token after
            them; 0 = chunks end anywhere.
    """

    names_tokens: ClassVar[bool] = True
    reads_encoder: ClassVar[bool] = False
    releases: ClassVar[bool] = True
    appends: ClassVar[bool] = False
    prompt_tail: int = 0

    def for_request(self, encoder_tokens: int, prompt_tokens: int | None = None) -> Policy:
        """Return the policy of a request with so many encoder tokens (image patches, audio frames) and prompt tokens,
        where these are known."""
        return self

    def for_pool(self, num_blocks: int) -> Policy:
        """Return the policy in a pool that caches prefixes and has so many blocks for the group."""
        return self

    def to_go_on(self) -> Policy:
        """Return the policy of a request whose prompt later ones go on from rather than part inside."""
        return self

    def for_prefix(self, cached: int, *kept: int) -> Policy:
        """Return the policy of a request that begins with `cached` tokens of the prefix cache, and of which later ones
        may begin with so many tokens as each of `kept`, the likeliest first; 0 = none."""
        return self

    def for_little_room(self, cached: int, *kept: int, at_end: bool = True) -> Policy:
        """Return the policy of a request that would not fit with all that it leaves for later ones: it leaves what a
        later one may begin with at `kept` and, with `at_end`, before its prompt's end only. The other arguments are
        those of `for_prefix`."""
        return self

    def answer_end(self, length: int, block_size: int) -> int:
        """Return the last length, at most `length`, within a request's answer after which its block is worth a copy
        before the next token changes it, as a later request may begin there; 0 = there is none."""
        return 0

    @property
    def optional_blocks(self) -> int:
        """Return how many blocks a sequence may take in addition to those of `placed`, until `for_prefix` decides."""
        return 0

    # Which blocks are needed.

    @abstractmethod
    def active_blocks(self, length: int, block_size: int) -> tuple[range, ...]:
        """Return ascending, disjoint runs of blocks that the token at position `length` and all later ones may read.

        Everything else may be released; after a prefix hit of `length` tokens, exactly these are attached
        and so touched (Jenga's balanced eviction: a group touches only the blocks it would need again).
        """

    @abstractmethod
    def possible_prefix(self, is_hit: Sequence[bool], block_size: int) -> Sequence[int]:
        """Return the prefix lengths that can be served when the blocks in `is_hit` are cached: ascending, from 0, in
        units of `alignment`."""

    @abstractmethod
    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        """Return the most blocks held at once while `length` tokens are computed, at most `step_tokens` in one step."""

    def alignment(self, block_size: int) -> int:
        """Return the number of tokens of which every prefix length is a multiple."""
        return block_size

    def most_blocks(self, length: int, block_size: int) -> int:
        """Return how many entries the block table keeps once `length` tokens are computed; later ones are released, and
        new ones may be appended in their place."""
        return UNBOUNDED

    def longest_prefix(self, length: int, block_size: int) -> int:
        """Return the longest prefix, of at most `length` tokens, that the blocks of a sequence serve once it has
        computed so many."""
        return self.full_blocks(length, length, block_size) * block_size

    # Where tokens lie.

    def num_blocks(self, length: int, block_size: int) -> int:
        """Return how many entries the block table of a sequence of `length` tokens has."""
        return -(-length // block_size)

    def placed(self, entries: range, block_size: int) -> Sequence[int]:
        """Return those of the table's `entries` that have a block until it is released; the others never have one."""
        return entries

    def entries_apart(self, block_size: int) -> int:
        """Return the most entries from one that is `placed` to the next."""
        return 1

    def holds(self, entry: int, length: int, block_size: int) -> bool:
        """Tell whether the block of a table entry holds something of the first `length` tokens, so that it has to be
        copied before another sequence changes it."""
        return entry * block_size < length

    def capacity(self, num_blocks: int, block_size: int, num_slots: int) -> int:
        """Return the longest sequence, in tokens, that `num_blocks` entries serve without another allocation.

        Args:
            num_slots: the length that the table was last extended to.
        """
        return num_blocks * block_size

    def written_blocks(self, start: int, stop: int, block_size: int) -> range:
        """Return the table entries that may change when tokens [`start`, `stop`) are computed."""
        return range(start // block_size, -(-stop // block_size)) if start < stop else range(0)

    def full_blocks(self, num_known: int, num_computed: int, block_size: int) -> int:
        """Return how many leading blocks can be cached: the first `num_known` tokens filled them for good, and they
        hold that still when `num_computed` tokens are computed."""
        return num_known // block_size

    def prefix_end(self, block: int, block_size: int) -> int:
        """Return the tokens of the prefix that ends with `block`; among blocks last needed together the longest is
        evicted first."""
        return (block + 1) * block_size

    def filled_tokens(self, block: int, length: int, block_size: int) -> int:
        """Return how many of the `block_size` tokens in a block hold something when `length` are computed."""
        return min(block_size, max(0, length - block * block_size))
