"""Gives a new sequence the cached blocks of its prompt's beginning, from the pool or another tier."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import BlockTables, RequestBlocks
from jpaged.memory.checkpoint_share import CheckpointShare
from jpaged.memory.eviction_key import EvictionKey
from jpaged.memory.hash_chain import HashChain, Link, TokenSpan, last_end
from jpaged.memory.policies import Policy
from jpaged.memory.policies.attention import leading_hits
from jpaged.memory.prefix_cache import PrefixCache, longest_prefix, prefix_tables
from jpaged.memory.prefix_prediction import PredictedPrefixes
from jpaged.memory.recent_prefixes import RecentPrefixes
from jpaged.memory.step_blocks import StepBlocks
from jpaged.memory.table_updater import TableUpdater
from jpaged.memory.tiers import TierFill, TierName, Tiers

MOST_NAMED = 4
"""Prompts whose hash chains are remembered: a prompt that waits for room is looked up in every step."""


class _NamedPrompt(NamedTuple):
    """The hash chains of a prompt, with the values that they follow from."""

    known: tuple[Any, ...]
    chains: dict[int, HashChain]


class _Match(NamedTuple):
    """Says what the pool has of a prompt, as long as no block with one of its contents comes or goes.

    Attributes:
        known, groups: the values that it follows from.
        length, found: see `PrefixCache.match`.
        kept: leading tokens that are cached of the layers that release nothing.
    """

    known: tuple[Any, ...]
    groups: Sequence[tuple[Policy, int]]
    length: int
    found: list[list[int | None]]
    kept: int


def _copies(chains: Mapping[int, HashChain]) -> dict[int, HashChain]:
    return {key: chain.copy() for key, chain in chains.items()}


class PrefixLookup:
    """Finds and attaches the longest prefix of a prompt that is cached, see `MemoryManager.match_prefix`.

    Looking teaches nothing: a request that waits for room is looked up in every step. `learn` is for one that runs.

    Args:
        groups: policy and block size (tokens) of each layer group.
        allocator, cache, updater: the blocks, their contents and their owners.
        step: learns which blocks are filled from a tier.
        recent: hears of each prompt that runs; None = nothing needs it.
        predicted: chooses which of its blocks to protect; None = none.
        checkpoints: learns where requests part; None = no layers keep states.
        prefix_step: number of tokens of which every prefix is a multiple.
        tiers: have content that the pool lacks; None = there are none.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Policy, int]],
        allocator: BlockAllocator,
        cache: PrefixCache,
        updater: TableUpdater,
        step: StepBlocks,
        *,
        recent: RecentPrefixes | None,
        predicted: PredictedPrefixes | None,
        checkpoints: CheckpointShare | None,
        prefix_step: int,
        tiers: Tiers | None,
    ) -> None:
        self._checkpoints = checkpoints
        self._groups = groups
        self._prefix_step = prefix_step
        self._allocator = allocator
        self._cache = cache
        self._updater = updater
        self._step = step
        self._recent = recent
        self._predicted = predicted
        self._tiers = tiers
        self._named: deque[_NamedPrompt] = deque(maxlen=MOST_NAMED)
        self._matched: _Match | None = None  # of the prompt that was last looked up twice

    def attach(
        self,
        sequence: BlockTables,
        token_ids: Sequence[int],
        limit: int,
        *,
        salt: Hashable,
        spans: Sequence[TokenSpan],
        from_tiers: bool,
    ) -> int:
        """Attach at most `limit` cached tokens to a sequence without blocks, which keeps to `token_ids`, and fix its
        policies; return how many tokens."""
        known = (self._cache.generation, repr(salt), tuple(spans), limit, tuple(token_ids))
        named = self._take_named(known)
        if named is not None:
            known = named.known  # the same object from here on: `_match` compares no long prompt again
        sequence.chains = self._cache.chains(salt, spans) if named is None else named.chains
        length = self._attach_from_tiers(sequence, token_ids, limit, spans) if from_tiers else 0
        if length:
            return length
        match = self._match(sequence, token_ids, limit, spans, known, is_named=named is not None)
        self._named.append(_NamedPrompt(known, _copies(sequence.chains)))
        self._attach_match(sequence, match, spans)
        return match.length

    def attach_named(
        self,
        sequence: BlockTables,
        chains: Mapping[int, HashChain],
        token_ids: Sequence[int],
        limit: int,
        spans: Sequence[TokenSpan],
    ) -> int:
        """Do what `attach` does with the hash chains of a prompt that begins with the same `limit` tokens: none of
        these is hashed again."""
        sequence.chains = _copies(chains)
        for chain in sequence.chains.values():
            chain.truncate(limit // chain.block_size)
        length, found = self._cache.match(sequence, token_ids, limit, spans)
        self._attach_match(sequence, _Match((), sequence.request.groups, length, found, self._kept_of(found)), spans)
        return length

    def _attach_match(self, sequence: BlockTables, match: _Match, spans: Sequence[TokenSpan]) -> None:
        """Attach what the pool has of a prompt, after the policies are fixed."""
        request, length = sequence.request, match.length
        request.parts_at = max(length, match.kept)
        self._fix_policies(sequence, length, spans)
        if length:
            self._updater.attach(sequence, prefix_tables(request.groups, match.found, length), length)

    def _match(
        self,
        sequence: BlockTables,
        token_ids: Sequence[int],
        limit: int,
        spans: Sequence[TokenSpan],
        known: tuple[Any, ...],
        *,
        is_named: bool,
    ) -> _Match:
        """Return what the pool has of a prompt. A prompt that waits for room is matched again only after a block of its
        own came or went.

        Args:
            is_named: whether its hash chains were remembered, as it was looked up before.
        """
        matched, groups = self._matched, sequence.request.groups
        is_same = is_named and matched is not None and matched.known == known and matched.groups == groups
        if is_same and matched is not None and not self._cache.tracked_changed:
            return matched
        length, found = self._cache.match(sequence, token_ids, limit, spans)
        match = _Match(known, list(groups), length, found, self._kept_of(found))
        if is_same:
            self._cache.tracked_changed = False
        elif is_named:
            links = (link for chain in sequence.chains.values() for link in chain.links)
            self._cache.track(frozenset(link.digest for link in links))
        if is_named:
            self._matched = match
        return match

    def adopt(
        self, sequence: BlockTables, token_ids: Sequence[int], places: Sequence[Sequence[int]], salt: Hashable
    ) -> list[list[tuple[int, int]]] | None:
        """Attach a prefix whose content comes from elsewhere; see `MemoryManager.adopt`."""
        length = len(token_ids)
        sequence.chains = self._cache.chains(salt)
        _, found = self._cache.match(sequence, token_ids, length)
        self._fix_policies(sequence, length, ())
        active = [
            [i for run in policy.active_blocks(length, size) for i in run] for policy, size in sequence.request.groups
        ]
        if active != [list(mine) for mine in places]:
            raise ValueError(f"a prefix of {length} tokens has blocks {places}, and the layers here read {active}")
        lacking = [[(row, i) for row, i in enumerate(mine) if found[g][i] is None] for g, mine in enumerate(places)]
        if self._attach_contents(sequence, found, length) is None:
            return None
        return [[(row, sequence.tables[g][i]) for row, i in mine] for g, mine in enumerate(lacking)]

    def cached(self, token_ids: Sequence[int], salt: Hashable, spans: Sequence[TokenSpan]) -> int:
        """Return how many tokens `attach` would find in the pool now; nothing is attached."""
        request = RequestBlocks(-1, self._allocator.new_request(), self._groups, 0)
        tables = BlockTables(request, self._cache.chains(salt, spans), 0)
        return self._cache.match(tables, token_ids, max(len(token_ids) - 1, 0), spans)[0]

    def _kept_of(self, found: list[list[int | None]]) -> int:
        """Return how many leading tokens are cached of the layers that release nothing; 0 where all release or none."""
        groups = [(g, size) for g, (policy, size) in enumerate(self._groups) if not policy.releases]
        if len(groups) == len(self._groups):
            return 0
        return min((leading_hits([block is not None for block in found[g]]) * size for g, size in groups), default=0)

    def _take_named(self, known: tuple[Any, ...]) -> _NamedPrompt | None:
        """Take a prompt out of the memory of recent lookups; None where it is not in it."""
        for place, named in enumerate(self._named):
            if named.known == known:
                del self._named[place]
                return named
        return None

    def _attach_from_tiers(
        self, sequence: BlockTables, token_ids: Sequence[int], limit: int, spans: Sequence[TokenSpan]
    ) -> int:
        """Attach a prefix of which a part was read from tiers; return its tokens, 0 where the pool has as much of it or
        is short of blocks."""
        staged = {} if self._tiers is None else self._tiers.prefetch.staged(sequence.request.request_id)
        if self._tiers is None or not staged:
            return 0
        length, found = self._cache.match(sequence, token_ids, limit, spans, staged)
        here = [[block is not None for block in blocks] for blocks in found]
        cached = longest_prefix(sequence.request.groups, here, limit, spans)
        if length <= cached:
            return 0
        tokens: dict[TierName, int] = {}
        for number, tier in enumerate(self._tiers.each):
            nearer = {key for key, block in staged.items() if block.tier <= number}
            is_all = len(nearer) == len(staged)
            reached = length if is_all else self._cache.match(sequence, token_ids, limit, spans, nearer)[0]
            tokens[tier.name], cached = reached - cached, reached
        request = sequence.request
        before = request.groups, request.begun
        self._fix_policies(sequence, length, spans)
        attached = self._attach_contents(sequence, found, length)
        if attached is None:
            request.groups, request.begun = before  # a shorter prefix is attached, which the policies have to fit
            return 0
        fills = []
        for g, block, link in attached:
            read = staged[g, link.digest]
            fills.append((TierFill(g, block, read.content, read.tier), link))
        self._step.filled.update((fill.group, fill.block) for fill, _ in fills)
        self._tiers.fill(fills, tokens)
        request.tier_tokens = {name: number for name, number in tokens.items() if number}
        return length

    def learn(self, sequence: BlockTables) -> None:
        """Learn from the request of a sequence that `attach` was called for and that now runs; once a request."""
        request = sequence.request
        if self._recent is None or request.begun is None or (shared := self._recent.arrived(sequence)) is None:
            return
        if self._checkpoints is not None and shared.tokens:
            self._checkpoints.arrived(shared.tokens, goes_on=shared.goes_on)
        if self._predicted is not None:
            self._predicted.lost.requested(request.request_id, request.begun[0])

    def _fix_policies(self, sequence: BlockTables, length: int, spans: Sequence[TokenSpan]) -> None:
        """Fix the policies and predictions of a sequence that begins with a cached prefix of `length` tokens."""
        shared, goes_on = (0, False) if self._recent is None else self._recent.look(sequence)
        request, seen = sequence.request, self._checkpoints
        if seen is not None and shared:
            request.junction = 0 if goes_on or shared < seen.interval else shared
        elif seen is not None and not seen.goes_on and request.prompt_tokens is not None:
            # The first of its kind: the next one may be another question about the same document.
            request.junction = (request.prompt_tokens - 1) // seen.interval * seen.interval
        request.item_end = last_end(spans[-1].stop, spans, self._prefix_step) if spans else 0
        ends = request.known_ends(self._prefix_step, spans, parts=seen is not None and seen.parts)
        request.begin(length, shared, ends, goes_on=seen is not None and seen.goes_on)
        if self._predicted is not None:
            self._predicted.predict(sequence, shared)

    def _attach_contents(
        self, sequence: BlockTables, found: list[list[int | None]], length: int
    ) -> list[tuple[int, int, Link]] | None:
        """Attach a prefix of `length` tokens; return the blocks that it took for content from elsewhere, or None, with
        nothing attached, when the pool is short of blocks.

        The prefix cache finds these blocks from now on, so they have to be filled before any chunk of this step runs.

        Args:
            found: for each group, the block of the pool for each logical one, None where it has none.
        """
        groups = sequence.request.groups
        active = [
            [i for run in policy.active_blocks(length, size) for i in run] for policy, size in groups
        ]  # whatever else was read is not needed
        missing = [[i for i in mine if found[g][i] is None] for g, mine in enumerate(active)]
        held = [(g, block) for g, mine in enumerate(active) for i in mine if (block := found[g][i]) is not None]
        for g, block in held:  # else they could be evicted for those that are taken
            self._allocator.share(g, block)
        taken = self._allocator.take([len(mine) for mine in missing], sequence.request.open_pages)
        if taken is None:
            time = EvictionKey(self._updater.next_tick(), 0)
            for g, block in held:
                self._allocator.release(g, block, time, keep=True)
            return None
        fills: list[tuple[int, int, Link]] = []
        for g, mine in enumerate(missing):
            links = self._cache.chain(sequence, g).links
            for i, block in zip(mine, taken[g], strict=True):
                found[g][i] = block
                fills.append((g, block, links[i]))
                held.append((g, block))
                if self._cache.twin(g, links[i]) is None:
                    self._cache.insert(g, block, links[i])
        self._updater.attach(sequence, prefix_tables(groups, found, length), length)
        for g, block in held:
            # The key is never used: the sequence owns the block too.
            self._allocator.release(g, block, EvictionKey(0, 0), keep=True)
        return fills
