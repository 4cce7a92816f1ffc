"""Which physical block holds which content, per group, and the longest prefix that all groups can serve together.

The cache holds no block: one that somebody uses is found here just as one that waits, evictable, in the allocator. The
allocator says when content is lost (`PrefixCache.forget`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jpaged.memory.hash_chain import Link
from jpaged.memory.policies import Policy


class GroupHits(NamedTuple):
    """Cached blocks of one group along a prompt.

    Attributes:
        policy: of the group.
        block_size: tokens a block.
        blocks: physical block of every logical one, None where it is not cached.
    """

    policy: Policy
    block_size: int
    blocks: list[int | None]


class PrefixCache:
    """Content to block and back, for every group."""

    def __init__(self, num_groups: int) -> None:
        self._block_of: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._link_of: list[dict[int, Link]] = [{} for _ in range(num_groups)]

    def find(self, g: int, link: Link) -> int | None:
        """The block of group `g` with this content; the tokens themselves are compared, not only the digest."""
        block = self._block_of[g].get(link.digest)
        if block is None or self._link_of[g][block].tokens != link.tokens:
            return None
        return block

    def insert(self, g: int, block: int, link: Link) -> None:
        """Remember the content of a full block, unless another block with the same content came first."""
        if link.digest not in self._block_of[g]:
            self._block_of[g][link.digest] = block
            self._link_of[g][block] = link

    def holds(self, g: int, block: int) -> bool:
        """Whether the content of `block` can be found."""
        return block in self._link_of[g]

    def forget(self, g: int, block: int) -> None:
        """The content of `block` is lost or about to be overwritten."""
        link = self._link_of[g].pop(block, None)
        if link is not None:
            del self._block_of[g][link.digest]

    def num_cached(self, g: int) -> int:
        """Blocks of group `g` whose content can be found."""
        return len(self._link_of[g])


def longest_prefix(groups: Sequence[GroupHits], limit: int) -> int:
    """The longest prefix, in tokens and at most `limit`, that is valid for every group (Jenga, section 5.3).

    Its length divides by every group's block size, as a group can only attach whole blocks.
    """
    possible = [
        (size, policy.possible_prefix([block is not None for block in blocks], size))
        for policy, size, blocks in groups
    ]
    bound = min(limit, *(max(lengths) * size for size, lengths in possible))
    step = math.lcm(*(size for size, _ in possible))
    for length in range(bound // step * step, 0, -step):
        if all(length // size in lengths for size, lengths in possible):
            return length
    return 0
