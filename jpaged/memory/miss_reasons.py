"""Explains why prompt tokens were not found in the prefix cache."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict

from jpaged.memory.block_tables import BlockTables
from jpaged.memory.layout import PoolLayout
from jpaged.memory.prefix_cache import PrefixCache

NEVER_SEEN, EVICTED, OTHER_SALT = "never_seen", "evicted", "other_salt"
INSIDE_BLOCK, NO_CHECKPOINT, CACHING_OFF = "inside_block", "no_checkpoint", "caching_off"
REASONS = (NEVER_SEEN, EVICTED, OTHER_SALT, INSIDE_BLOCK, NO_CHECKPOINT, CACHING_OFF)

NAMES_A_BLOCK = 4
"""Names that are remembered for each block of the pool: what was evicted longer ago counts as never seen."""


class MissReasons:
    """Remembers the names of blocks of sequences that ended, and counts the tokens that later prompts missed.

    Args:
        layout: how the pool is cut.

    Attributes:
        tokens: prompt tokens that were not found when their request was first admitted, by reason: "never_seen" (by no
            sequence that has ended), "evicted", "other_salt" (computed for another cache salt or adapter),
            "inside_block" (a hit ends at a block, and the last token is always computed), "no_checkpoint" (attention
            had them, and no recurrent state was kept there), "caching_off" (there is no cache, or the request computes
            its whole prompt).
    """

    def __init__(self, layout: PoolLayout) -> None:
        self.tokens: Counter[str] = Counter()
        named = [(g, plan) for g, plan in enumerate(layout.groups) if plan.spec.policy.names_tokens]
        self._size = max((plan.spec.block_size for _, plan in named), default=0)
        attention = [(g, plan) for g, plan in named if not plan.spec.policy.optional_blocks]
        self._attention = [g for g, plan in attention if plan.spec.block_size == self._size]
        self._has_states = len(attention) < len(named)
        self._most = NAMES_A_BLOCK * max((plan.num_blocks for _, plan in named), default=0)
        self._seen: OrderedDict[bytes, int] = OrderedDict()  # names, with a hash of the tokens alone
        self._roots: OrderedDict[int, bytes] = OrderedDict()  # that hash, and the root of a chain that had them
        self._next: OrderedDict[bytes, bytes] = OrderedDict()  # tokens that came next, by the name before them

    def forget(self) -> None:
        """Forget all names: the cache is empty, which is no eviction."""
        for names in (self._seen, self._roots, self._next):
            names.clear()

    def ended(self, sequence: BlockTables) -> None:
        """Remember the blocks of a sequence that was freed. O(its new blocks)."""
        chain = sequence.chains.get(self._size)
        if chain is None:
            return
        links = chain.links[: sequence.num_computed // self._size]
        start = len(links)
        while start and links[start - 1].digest not in self._seen:
            start -= 1
        content, before = (self._seen[links[start - 1].digest], links[start - 1].digest) if start else (0, chain.root)
        for link in links[start:]:
            content = hash((content, link.tokens))
            self._seen[link.digest] = content
            self._roots.setdefault(content, chain.root)
            self._next[before] = link.tokens
            before = link.digest
        for names in (self._seen, self._roots, self._next):
            while len(names) > self._most:
                names.popitem(last=False)

    def missed(self, sequence: BlockTables, cache: PrefixCache, num_prompt: int) -> None:
        """Count the tokens of a prompt that a sequence, which has just been given its cached prefix, did not find."""
        cached, size = sequence.num_computed, self._size
        chain = sequence.chains[size]
        links = chain.links[: (num_prompt - 1) // size]
        first, reason, content = cached // size, INSIDE_BLOCK, 0
        for link in links[:first] if first < len(links) else ():
            content = hash((content, link.tokens))
        for i in range(first, len(links)):
            link, before = links[i], links[i - 1].digest if i else chain.root
            content = hash((content, link.tokens))
            if (
                self._has_states
                and self._attention
                and all(cache.named(g, link.digest) is not None for g in self._attention)
            ):
                reason = NO_CHECKPOINT
            elif link.digest in self._seen:
                reason = EVICTED
            elif (root := self._roots.get(content)) is not None:
                reason = OTHER_SALT if root != chain.root else EVICTED
            else:
                reason = NEVER_SEEN
            start = max(cached, i * size)
            inside = self._inside(before, link.tokens) if reason == NEVER_SEEN else 0
            self.tokens[INSIDE_BLOCK] += inside
            self.tokens[reason] += (i + 1) * size - start - inside
        rest = num_prompt - max(cached, len(links) * size)
        self.tokens[NEVER_SEEN if reason == NEVER_SEEN else INSIDE_BLOCK] += rest

    def off(self, num_tokens: int) -> None:
        """Count the tokens of a prompt that was not looked up."""
        self.tokens[CACHING_OFF] += num_tokens

    def _inside(self, before: bytes, tokens: bytes) -> int:
        """Return how many of a block's first tokens came after the block before it in another sequence, too."""
        known, common = self._next.get(before, b""), 0
        width = array("q").itemsize
        while common + width <= min(len(known), len(tokens)):
            if known[common : common + width] != tokens[common : common + width]:
                break
            common += width
        return common // width
