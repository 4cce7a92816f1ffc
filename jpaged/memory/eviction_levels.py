"""Gives released blocks the level of priority at which they are evicted.

Most have level 0, where the time of the last need decides. A request can ask for others (`Retention`). Windows and
states that hardly any later prompt needs go before all (`UNLIKELY`), and states whose KV takes room anyway after those
of level 0 (`IN_USE`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jpaged.cache_retention import CacheRetention
from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import BlockTables
from jpaged.memory.checkpoint_share import CheckpointShare, Guess
from jpaged.memory.eviction_key import EvictionKey
from jpaged.memory.hash_chain import Link
from jpaged.memory.policies import Policy
from jpaged.memory.prefix_cache import PrefixCache
from jpaged.memory.retention import Retention, level_at

UNLIKELY = -1000
"""Level of priority, below all that requests can ask for, of blocks that hardly any prefix will need."""

LAST_PART, MOST_WINDOWS = 512, 5
"""Tokens at the end of a prompt that begins like no other within which a later one often parts from it: the next
question about the same document. Of windows far shorter than that only so many are kept: all of them would be more than
a pool holds that is sized for windows."""

IN_USE = 1
"""Level of a state where a running request's prompt parts from another one: a hit there shares KV that is in use, and
takes no room. Requests can ask for this one, too, and for any higher."""


class _InUse(NamedTuple):
    """A state at `IN_USE`: the contents of its KV, and what it counts as once no sequence has these."""

    kv: list[tuple[int, Link]]
    guess: Guess | None


class EvictionLevels:
    """Ranks the blocks that a sequence releases, and ends ranks whose reason is gone.

    Args:
        allocator, cache: the blocks and their contents.
        retention: the priorities that requests gave.
        checkpoints: knows the groups with states; None = there are none.
        next_tick: returns a tick of the eviction clock that is later than all before.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        cache: PrefixCache,
        retention: Retention,
        checkpoints: CheckpointShare | None,
        next_tick: Callable[[], int],
    ) -> None:
        self._allocator = allocator
        self._cache = cache
        self._retention = retention
        self._checkpoints = checkpoints
        self._next_tick = next_tick
        self._in_use: dict[tuple[int, int], _InUse] = {}

    def are_plain(self, sequence: BlockTables, g: int) -> bool:
        """Tell whether all blocks that a sequence releases of a group have level 0 and are not protected, unless they
        are states or `unlikely` to be needed: then `ranked` need not be asked."""
        asked = sequence.request.retention is not None or bool(self._retention)
        return not (sequence.predicted[g] or asked or self._in_use)

    def ranked(
        self,
        sequence: BlockTables,
        g: int,
        logical: int,
        key: EvictionKey,
        *,
        is_cached: bool,
        is_unlikely: bool,
        junction: int,
        guess: Guess | None = None,
    ) -> tuple[EvictionKey, bool]:
        """Return the key at the level of priority that a released block has from now on, and whether to protect it.

        Args:
            logical: number of the block in the table.
            key: its key without any level.
            is_cached: whether its content can be found.
            is_unlikely: whether hardly any prefix will need it.
            junction: tokens of the prefix whose state is worth more while the sequence runs; 0 = none.
            guess: why the state is kept; None = that is no guess, or it is none.
        """
        block, (policy, size) = sequence.tables[g][logical], sequence.request.groups[g]
        end, retention, level = policy.prefix_end(logical, size), sequence.request.retention, 0
        protect = any(logical in run for run in sequence.predicted[g])
        if is_cached and (retention is not None or self._retention):
            link = self._cache.link(g, block)
            assert link is not None, "a cached block has a content"
            level = self._asked_level(retention, g, link, end)
        self._in_use.pop((g, block), None)
        if is_cached and not level and junction and end == junction and not protect:
            self._in_use[g, block] = _InUse(self._kv_at(sequence, end), guess)
            return key.at_level(IN_USE), protect
        level = _lowered(level, is_unlikely and not protect)
        if level:
            return key.at_level(level), False  # the user knows better than the prediction
        return key, protect

    def of_answer(self, sequence: BlockTables, g: int, link: Link, end: int, *, is_unlikely: bool) -> int:
        """Return the level of a state that an answer leaves after `end` tokens, for when it is released."""
        return _lowered(self._asked_level(sequence.request.retention, g, link, end), is_unlikely)

    def may_keep_answer(self, sequence: BlockTables, g: int, end: int, *, is_unlikely: bool) -> bool:
        """Tell whether a state that an answer leaves after `end` tokens takes no block of a higher level."""
        retention = sequence.request.retention
        asked = None if retention is None else level_at(retention, end - 1)
        level = _lowered(0 if asked is None else asked[0], is_unlikely)
        return self._allocator.has_below(g, level, sequence.request.open_pages)

    def _asked_level(self, retention: CacheRetention | None, g: int, link: Link, end: int) -> int:
        """Return the level that requests gave to a content whose prefix ends at `end`, after noting what the one that
        releases it asks for."""
        asked = None if retention is None else level_at(retention, end - 1)
        if asked is not None:
            self._retention.note(g, link.digest, *asked)
        return self._retention.level(g, link.digest)

    def _kv_at(self, sequence: BlockTables, end: int) -> list[tuple[int, Link]]:
        """Return the contents that end after `end` tokens in the groups without states."""
        assert self._checkpoints is not None
        found = []
        for g, (policy, size) in enumerate(sequence.request.groups):
            if policy.names_tokens and g not in self._checkpoints.groups:
                links = self._cache.chain(sequence, g).links
                if 0 < end // size <= len(links):
                    found.append((g, links[end // size - 1]))
        return found

    def end_use(self) -> None:
        """Give the states at `IN_USE` the level of any other, as needed now, once no sequence has their KV or they are
        guesses of the kind that fewer recent requests began with."""
        groups = self._allocator.groups
        for (g, block), (kv, guess) in list(self._in_use.items()):
            key = groups[g].evictable.get(block)
            if key is None or key.level != IN_USE:  # it is used, was evicted, or has another level by now
                del self._in_use[g, block]
                continue
            held = ((o, self._cache.find(o, link)) for o, link in kv)
            seen = self._checkpoints
            refuted = seen is not None and seen.is_rarer(guess)
            if refuted or not any(found is not None and groups[o].ref_count[found] for o, found in held):
                del self._in_use[g, block]
                now = EvictionKey(self._next_tick(), key.negative_end)
                hardly = seen is not None and seen.is_unlikely(guess)
                self._allocator.requeue(g, block, now.at_level(_lowered(0, hardly)))
                if guess is not None and seen is not None:
                    seen.left(g, block, guess)

    def is_in_use(self, g: int, block: int) -> bool:
        """Tell whether a state without an owner is at `IN_USE`: it is no guess until no sequence has its KV."""
        return (g, block) in self._in_use

    def end_priorities(self) -> None:
        """Give blocks whose priority has ended the default one, as if they were needed now."""
        for g, digest in self._retention.take_ended():
            block = self._cache.named(g, digest)
            key = None if block is None else self._allocator.groups[g].evictable.get(block)
            if block is not None and key is not None:
                self._allocator.requeue(g, block, EvictionKey(self._next_tick(), key.negative_end))

    def restored(self) -> None:
        """Find the states at `IN_USE` in a pool that was restored: the next request to end frees them."""
        for g in () if self._checkpoints is None else self._checkpoints.groups:
            for block, key in self._allocator.groups[g].evictable.items():
                link = self._cache.link(g, block) if key.level == IN_USE else None
                if link is not None and not self._retention.level(g, link.digest):
                    self._in_use[g, block] = _InUse([], Guess.INSIDE)


def _lowered(level: int, is_unlikely: bool) -> int:
    """Return the level of a block that hardly any prefix will need, unless requests asked for a higher one."""
    return min(level, UNLIKELY) if level <= 0 and is_unlikely else level


def unlikely_blocks(sequence: BlockTables, g: int, passed: range, length: int) -> set[int]:
    """Return those of the logical blocks that a window has `passed` which hardly any later prompt will need.

    A later prompt begins where this one's end is near, where it parted from an earlier one or what it began with:
    there it needs the window before. Of other places there are many, and a sequence passes them later than an earlier
    one ended, whose last window would be evicted for them: none of several sessions would hit any more (vLLM, issue
    48435).

    Args:
        length: tokens of the sequence that are computed.
    """
    request = sequence.request
    policy, size = request.groups[g]
    end = max(length, request.prompt_tokens or 0)
    parted = [prefix for prefix in ((request.begun or (0,))[0], request.parts_at) if prefix]
    # A prompt that begins at the start of the last window needs the one before it: two are kept.
    first = _window_start(policy, end, size)
    if not parted:  # the first of its kind: the next one may be another question about the same document
        for _ in range(MOST_WINDOWS - 2):
            if end - first < LAST_PART:
                first = _window_start(policy, first, size)
    wanted = [range(_window_start(policy, first, size) // size, passed.stop)]
    for prefix in parted:
        wanted += policy.active_blocks(prefix, size)
    wanted += sequence.predicted[g]
    return {i for i in passed if not any(i in run for run in wanted)}


def _window_start(policy: Policy, length: int, size: int) -> int:
    """Return the first token of the first block that is read after `length` tokens."""
    return policy.active_blocks(length, size)[0].start * size
