"""The prefix cache: which physical block holds which content, and the longest prefix all groups can serve together.

It owns no block: one that somebody uses is found here just as one that waits, evictable, in the allocator,
which says when content is lost (`PrefixCache.forget`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from jpaged.memory.block_tables import NO_BLOCK, BlockTables
from jpaged.memory.hash_chain import HashChain, Link
from jpaged.memory.policies import Policy


class PrefixCache:
    """Content to block and back, for every group.

    Args:
        groups: policy and block size (tokens) of each group.
    """

    def __init__(self, groups: Sequence[tuple[Policy, int]]) -> None:
        self._groups = groups
        self._block_of: list[dict[bytes, int]] = [{} for _ in groups]
        self._link_of: list[dict[int, Link]] = [{} for _ in groups]

    # One block.

    def find(self, g: int, link: Link) -> int | None:
        """The block of group `g` with this content; the tokens are compared too, not only the digest."""
        block = self._block_of[g].get(link.digest)
        return block if block is not None and self._link_of[g][block] == link else None

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

    def check(self, g: int) -> None:
        """Raises AssertionError when content and blocks do not name each other."""
        there = {link.digest: block for block, link in self._link_of[g].items()}
        assert there == self._block_of[g], f"group {g}: the prefix cache finds blocks under lost content"

    # One sequence.

    def chains(self, salt: Hashable = None) -> dict[int, HashChain]:
        """Empty hash chains of a new sequence, by block size."""
        return {size: HashChain(size, salt) for _, size in self._groups}

    def match(self, chains: dict[int, HashChain], token_ids: Sequence[int], limit: int) -> tuple[int, list[list[int]]]:
        """The longest cached prefix of at most `limit` tokens, and each group's table for it.

        A table has `NO_BLOCK` where its policy needs nothing; the blocks are not yet owned.
        """
        found: list[list[int | None]] = []
        for g, (_, size) in enumerate(self._groups):
            chains[size].extend(token_ids, limit // size)
            found.append([self.find(g, link) for link in chains[size].links])
        hits = [[block is not None for block in blocks] for blocks in found]
        length = longest_prefix(self._groups, hits, limit)
        tables = []
        for (policy, size), blocks in zip(self._groups, found, strict=True):
            table = [NO_BLOCK] * (length // size)
            for run in policy.active_blocks(length, size):
                for i in run:
                    block = blocks[i]
                    assert block is not None, "an active block of a possible prefix is cached"
                    table[i] = block
            tables.append(table)
        return length, tables

    def record(self, tables: BlockTables, token_ids: Sequence[int], num_known: int) -> None:
        """Remember the blocks that the first `num_known` tokens have filled since the last call."""
        for g, (_, size) in enumerate(self._groups):
            full = num_known // size
            if full > tables.num_hashed[g]:
                chain, table = tables.chains[size], tables.tables[g]
                chain.extend(token_ids, full)
                for i in range(tables.num_hashed[g], full):
                    if table[i] != NO_BLOCK:
                        self.insert(g, table[i], chain.links[i])
                tables.num_hashed[g] = full

    def overwrite(self, tables: BlockTables, first_write: int, num_tokens: int) -> None:
        """The sequence writes [`first_write`, `num_tokens`): forget what these blocks, its own, held before.

        They hold something after a rewind, as of rejected speculative tokens. A sequence that shared them may
        have told the cache, so every block is looked up.
        """
        for g, (_, size) in enumerate(self._groups):
            start, link_of = first_write // size, self._link_of[g]
            for block in tables.tables[g][start : -(-num_tokens // size)]:
                if block in link_of:
                    self.forget(g, block)
            if start < tables.num_hashed[g]:
                tables.num_hashed[g] = start
                tables.chains[size].truncate(start)


def longest_prefix(groups: Sequence[tuple[Policy, int]], hits: Sequence[Sequence[bool]], limit: int) -> int:
    """The longest prefix, in tokens and at most `limit`, that is valid for every group (Jenga, section 5).

    Its length divides by every group's block size, as a group can only attach whole blocks.

    Args:
        groups: policy and block size (tokens) of each group.
        hits: for each group, whether each of its logical blocks is cached.
        limit: upper bound in tokens.
    """
    possible = [
        (size, policy.possible_prefix(is_hit, size)) for (policy, size), is_hit in zip(groups, hits, strict=True)
    ]
    bound = min(limit, *(max(lengths) * size for size, lengths in possible))
    step = math.lcm(*(size for size, _ in possible))
    for length in range(bound // step * step, 0, -step):
        if all(length // size in lengths for size, lengths in possible):
            return length
    return 0
