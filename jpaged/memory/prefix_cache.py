"""The prefix cache: which physical block holds which content, and the longest prefix all groups can serve together.

It owns no block. It finds a block that sequences use just as one that waits, evictable, in the allocator. When the
allocator evicts a block, the cache forgets its content (`PrefixCache.forget`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Hashable, Iterator, Mapping, Sequence

from jpaged.memory.block_tables import NO_BLOCK, BlockTables
from jpaged.memory.event_log import MediumEvents
from jpaged.memory.hash_chain import HashChain, Link, TokenSpan, may_end, tenant_of
from jpaged.memory.policies import Policy


class PrefixCache:
    """Maps content to the block that holds it, and back, for every group.

    Args:
        groups: policy and block size (tokens) of each group.

    Attributes:
        generation: number of the weights that blocks are computed with. Blocks of one generation are never found
            in another.
        watch: hears of each content that is found from now on, or no longer; None = nothing does.
        tracked_changed: whether a block with one of the contents that `track` named came or went since.
    """

    def __init__(self, groups: Sequence[tuple[Policy, int]]) -> None:
        self._groups = groups
        self.generation = 0
        self.watch: MediumEvents | None = None
        # Groups that name their blocks alike share a hash chain.
        self._chain_keys = [size if policy.names_tokens else -size for policy, size in groups]
        self._block_of: list[dict[bytes, int]] = [{} for _ in groups]
        self._link_of: list[dict[int, Link]] = [{} for _ in groups]
        self._tracked: frozenset[bytes] = frozenset()
        self.tracked_changed = True

    def track(self, digests: frozenset[bytes]) -> None:
        """Set `tracked_changed` from now on when a block with one of these contents, and no others, comes or goes."""
        self._tracked, self.tracked_changed = digests, False

    # One block.

    def find(self, g: int, link: Link) -> int | None:
        """Return the block of group `g` with this content, or None; the tokens are compared too, not only the
        digest."""
        block = self._block_of[g].get(link.digest)
        return block if block is not None and self._link_of[g][block].tokens == link.tokens else None

    def find_all(self, g: int, links: Sequence[Link]) -> list[int | None]:
        """Return what `find` returns for each of some contents."""
        block_of, link_of = self._block_of[g].get, self._link_of[g]
        found: list[int | None] = []
        for link in links:
            block = block_of(link[0])  # its digest
            found.append(block if block is not None and link_of[block].tokens == link.tokens else None)
        return found

    def twin(self, g: int, link: Link) -> int | None:
        """Return the block that has this content's digest, or None; no other can be inserted before it is forgotten."""
        return self._block_of[g].get(link.digest)

    def insert(self, g: int, block: int, link: Link) -> None:
        """Remember the content of a full block, which has no twin."""
        self._block_of[g][link.digest] = block
        self._link_of[g][block] = link
        if link.digest in self._tracked:
            self.tracked_changed = True
        if self.watch is not None:
            self.watch.stored(g, link)

    def link(self, g: int, block: int) -> Link | None:
        """Return the content of `block`, or None where it cannot be found."""
        return self._link_of[g].get(block)

    def chain(self, tables: BlockTables, g: int) -> HashChain:
        """Return the hash chain by which a sequence's blocks of a group are named, as far as it has grown."""
        return tables.chains[self._chain_keys[g]]

    def named(self, g: int, digest: bytes) -> int | None:
        """Return the block of a group whose content has this digest, or None."""
        return self._block_of[g].get(digest)

    def holds(self, g: int, block: int) -> bool:
        """Tell whether the content of `block` can be found."""
        return block in self._link_of[g]

    def contents(self, g: int) -> Mapping[int, Link]:
        """Return the known contents of a group's blocks, by block."""
        return self._link_of[g]

    def forget(self, g: int, block: int) -> None:
        """Forget the content of `block`, which is lost or about to be overwritten."""
        link = self._link_of[g].pop(block, None)
        if link is not None:
            del self._block_of[g][link.digest]
            if link.digest in self._tracked:
                self.tracked_changed = True
            if self.watch is not None:
                self.watch.removed(g, link)

    def check(self, g: int) -> None:
        """Raise AssertionError when content and blocks do not name each other."""
        there = {link.digest: block for block, link in self._link_of[g].items()}
        assert there == self._block_of[g], f"group {g}: the prefix cache finds blocks under lost content"

    # One sequence.

    def chains(self, salt: Hashable = None, spans: Sequence[TokenSpan] = ()) -> dict[int, HashChain]:
        """Return the empty hash chains of a new sequence, by block size (of tokens) or minus the block size (of encoder
        tokens)."""
        tenant = tenant_of(salt)
        if self.generation:
            salt = ("generation", self.generation, salt)
        return {
            key: HashChain(key, salt, spans, tenant) if key > 0 else HashChain(-key, ("encoder", salt), (), tenant)
            for key in self._chain_keys
        }

    def _grown(self, chains: dict[int, HashChain], g: int, token_ids: Sequence[int], num_blocks: int) -> HashChain:
        """Return the hash chain of a group, which grows to have links for `num_blocks` blocks."""
        policy, size = self._groups[g]
        chain = chains[self._chain_keys[g]]
        chain.extend(token_ids if policy.names_tokens else range(num_blocks * size), num_blocks)
        return chain

    def links(self, chains: dict[int, HashChain], g: int, token_ids: Sequence[int], num_blocks: int) -> list[Link]:
        """Return the links of the first `num_blocks` blocks of a group; the chains grow to hold them."""
        return self._grown(chains, g, token_ids, num_blocks).links[:num_blocks]

    def match(
        self,
        tables: BlockTables,
        token_ids: Sequence[int],
        limit: int,
        spans: Sequence[TokenSpan] = (),
        staged: Container[tuple[int, bytes]] = (),
    ) -> tuple[int, list[list[int | None]]]:
        """Return the longest cached prefix of at most `limit` tokens that ends within no whole image, and each group's
        blocks, None where one is not cached. The blocks are not yet owned.

        Args:
            staged: further content that counts as cached, by group and digest.
        """
        groups = tables.request.groups
        found: list[list[int | None]] = []
        hits: list[list[bool]] = []
        for g, (policy, size) in enumerate(groups):
            wanted = policy.full_blocks(limit, 0, size)
            links = self.links(tables.chains, g, token_ids, wanted)
            found.append(self.find_all(g, links))
            hits.append([block is not None for block in found[g]])
            if staged:
                hits[g] = [hit or (g, link.digest) in staged for hit, link in zip(hits[g], links, strict=True)]
        return longest_prefix(groups, hits, limit, spans), found

    def covered(
        self,
        token_ids: Sequence[int],
        salt: Hashable,
        limit: int,
        blocks: Sequence[Collection[int]],
        encoder_tokens: int,
        spans: Sequence[TokenSpan] = (),
    ) -> int:
        """Return the longest prefix of at most `limit` tokens that lies in `blocks`, a set for each group."""
        groups = [(policy.for_request(encoder_tokens), size) for policy, size in self._groups]
        chains, hits = self.chains(salt, spans), []
        for g, (policy, size) in enumerate(groups):
            links = self.links(chains, g, token_ids, policy.full_blocks(limit, 0, size))
            hits.append([self.find(g, link) in blocks[g] for link in links])
        return longest_prefix(groups, hits, limit, spans)

    def newly_full(
        self, tables: BlockTables, token_ids: Sequence[int], num_known: int
    ) -> Iterator[tuple[int, int, int, Link]]:
        """Yield (group, logical block, block, content) of the blocks that the first `num_known` tokens have filled
        since the last call."""
        for g, (policy, size) in enumerate(tables.request.groups):
            full = policy.full_blocks(num_known, tables.num_computed, size)
            if full > tables.num_hashed[g]:
                chain, table = self._grown(tables.chains, g, token_ids, full), tables.tables[g]
                for i in range(tables.num_hashed[g], full):
                    if table[i] != NO_BLOCK:
                        yield g, i, table[i], chain.links[i]
                tables.num_hashed[g] = full

    def content(self, tables: BlockTables, g: int, logical: int) -> Link | None:
        """Return the content of a block of a table; None while it is not known to be full."""
        if logical >= tables.num_hashed[g]:
            return None
        return tables.chains[self._chain_keys[g]].links[logical]

    def overwrite(self, tables: BlockTables, first_write: int, num_tokens: int) -> None:
        """Forget the content of the sequence's own blocks at [`first_write`, `num_tokens`), which is about to be
        overwritten.

        Such blocks hold content after a rewind, for example of rejected drafts. A sequence that shared them may have
        put them into the cache, so every block is looked up.
        """
        for g, (policy, size) in enumerate(tables.request.groups):
            written, link_of = policy.written_blocks(first_write, num_tokens, size), self._link_of[g]
            for block in tables.tables[g][written.start : written.stop]:
                if block in link_of:
                    self.forget(g, block)
            if written and written.start < tables.num_hashed[g]:
                tables.num_hashed[g], tables.committed = written.start, None
                tables.chains[self._chain_keys[g]].truncate(first_write // size)


def prefix_tables(
    groups: Sequence[tuple[Policy, int]], found: Sequence[Sequence[int | None]], length: int
) -> list[list[int]]:
    """Return each group's table for a prefix of `length` tokens, with `NO_BLOCK` where its policy needs nothing.

    Args:
        groups: policy and block size (tokens) of each group.
        found: the blocks that `PrefixCache.match` returned.
    """
    tables = []
    for (policy, size), blocks in zip(groups, found, strict=True):
        runs = policy.active_blocks(length, size)
        table = [NO_BLOCK] * runs[-1].stop
        for run in runs:
            for i in run:
                block = blocks[i]
                assert block is not None, "an active block of a possible prefix is cached"
                table[i] = block
        tables.append(table)
    return tables


def longest_prefix(
    groups: Sequence[tuple[Policy, int]],
    hits: Sequence[Sequence[bool]],
    limit: int,
    spans: Sequence[TokenSpan] = (),
) -> int:
    """Return the longest prefix, in tokens and at most `limit`, that is valid for every group (Jenga, section 5).

    Its length divides by every group's alignment: most can only attach whole blocks.

    Args:
        groups: policy and block size (tokens) of each group.
        hits: one list for each group that says of each logical block whether it is cached.
        limit: upper bound in tokens.
        spans: tokens that stand for images, of which those of a whole image are served together.
    """
    bound = limit
    possible: list[tuple[int, Collection[int]]] = []
    for (policy, size), is_hit in zip(groups, hits, strict=True):
        unit, lengths = policy.alignment(size), policy.possible_prefix(is_hit, size)
        bound = min(bound, lengths[-1] * unit)
        possible.append((unit, lengths if isinstance(lengths, range) else set(lengths)))
    step = math.lcm(*(unit for unit, _ in possible))
    for length in range(bound // step * step, 0, -step):
        if all(length // unit in lengths for unit, lengths in possible) and may_end(length, spans):
            return length
    return 0
