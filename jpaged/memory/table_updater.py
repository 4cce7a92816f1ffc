"""Puts blocks into the tables of sequences and takes them out again; every count stays true."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from jpaged.cache_retention import CacheRetention
from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import NO_BLOCK, BlockTables
from jpaged.memory.checkpoint_share import CheckpointShare
from jpaged.memory.copies import BlockCopy
from jpaged.memory.eviction_key import EvictionKey
from jpaged.memory.hash_chain import Link
from jpaged.memory.prefix_cache import PrefixCache
from jpaged.memory.prefix_prediction import PredictedPrefixes
from jpaged.memory.recent_prefixes import RecentPrefixes
from jpaged.memory.retention import Retention, level_at
from jpaged.memory.step_blocks import StepBlocks

UNLIKELY = -1000
"""Level of priority, below all that requests can ask for, of blocks that hardly any prefix will need."""

LAST_PART, MOST_WINDOWS = 512, 4
"""Tokens at the end of a prompt that begins like no other within which a later one often parts from it: the next
question about the same document. Of windows far shorter than that only so many are kept: all of them would be more than
a pool holds that is sized for windows."""

IN_USE = 1
"""Level of a state where a running request's prompt parts from another one: a hit there shares KV that is in use, and
takes no room. Requests can ask for this one, too, and for any higher."""


class TableUpdater:
    """Gives blocks to sequences and takes them back, in step with the allocator and the prefix cache.

    Args:
        aligned: whether, among blocks needed last together, the longest prefix is evicted first in every group.
        recent: remembers the prefixes of sequences that end; None = nothing needs them.
        predicted: protects the blocks that it expects to be needed again; None = none.
        checkpoints: bounds cached states; None = there are none.
        filled: called when a block is cached, see `Tiers.filled`; None = nothing needs it.
        retention: the priorities that requests gave.

    Attributes:
        clock: tick of the newest release, see `EvictionKey`.
        version: newest version of a table.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        cache: PrefixCache,
        step: StepBlocks,
        *,
        aligned: bool = True,
        recent: RecentPrefixes | None = None,
        predicted: PredictedPrefixes | None = None,
        checkpoints: CheckpointShare | None = None,
        filled: Callable[[int, int, Link, bool, int], None] | None = None,
        retention: Retention,
    ) -> None:
        self._retention = retention
        self._checkpoints = checkpoints
        self._recent = recent
        self._aligned = aligned
        self._predicted = predicted
        self._filled = filled
        self._allocator = allocator
        self._cache = cache
        self._step = step
        self._in_use: dict[tuple[int, int], list[tuple[int, Link]]] = {}  # states at `IN_USE`, with their KV's contents
        self.clock = 0
        self.version = 0

    def next_version(self) -> int:
        """Return a table version that no sequence had before."""
        self.version += 1
        return self.version

    def next_tick(self) -> int:
        """Return a tick of the eviction clock that is later than all before."""
        self.clock += 1
        return self.clock

    def attach(self, sequence: BlockTables, tables: list[list[int]], length: int) -> None:
        """Give a sequence without blocks the cached ones of a prefix of `length` tokens."""
        for g, (policy, size) in enumerate(sequence.request.groups):
            for block in tables[g]:
                if block != NO_BLOCK:
                    self._allocator.share(g, block)
                    if self._checkpoints is not None:
                        self._checkpoints.forget(g, block)
            sequence.released_below[g] = policy.active_blocks(length, size)[-1].start
            sequence.num_hashed[g] = len(tables[g])
        sequence.tables = tables
        sequence.num_computed = sequence.num_slots = length
        sequence.version = self.next_version()

    def missing_blocks(
        self, sequence: BlockTables, num_tokens: int, first_write: int
    ) -> tuple[list[int], list[list[int]]]:
        """Return the blocks that an append takes: for each group their number, and the shared logical blocks that some
        of them replace.

        Raises:
            ValueError: when positions before `first_write` have no slot, or one to be written was released.
        """
        needs: list[int] = []
        replaced: list[list[int]] = []
        for g, (policy, size) in enumerate(sequence.request.groups):
            table = sequence.tables[g]
            number = len(table)
            if policy.appends and first_write == number * size:  # nothing that there is gets written
                needs.append(max(0, -(-num_tokens // size) - number))
                replaced.append([])
                continue
            total = policy.num_blocks(num_tokens, size)
            if first_write and first_write > (capacity := policy.capacity(number, size, sequence.num_slots)):
                raise ValueError(f"first_write={first_write} leaves a hole after {capacity} tokens")
            shared: list[int] = []
            written = policy.written_blocks(first_write, num_tokens, size)
            if written.start < number:
                for i in policy.placed(range(written.start, min(number, written.stop)), size):
                    if table[i] == NO_BLOCK:
                        raise ValueError(f"first_write={first_write} lies in a released block (group {g})")
                    if self._step.owners(g, table[i]) > 1:
                        shared.append(i)
            replaced.append(shared)
            needs.append(len(policy.placed(range(number, total), size)) + len(shared))
        return needs, replaced

    def add_left(
        self, sequence: BlockTables, length: int, needs: list[int], replaced: list[list[int]]
    ) -> list[tuple[int, int]]:
        """Add to what an append takes a block for each one that holds the state after `length` tokens of an answer,
        which the append would change; return these as (group, block).

        Only tokens that are known name a state: where one of them is in flight, it is not kept.
        """
        assert self._checkpoints is not None
        left = []
        for g in self._checkpoints.of_answers:
            policy, size = sequence.request.groups[g]
            if policy.answer_end(length, size) != length or length // size > sequence.num_hashed[g]:
                continue
            entry, table = policy.num_blocks(length, size) - 1, sequence.tables[g]
            if (entry + 1) * size == length or entry in replaced[g] or entry >= len(table):
                continue
            link = self._cache.chain(sequence, g).links[length // size - 1]
            if self._cache.twin(g, link) is None:
                needs[g] += 1
                replaced[g].append(entry)
                left.append((g, table[entry]))
        return left

    def remove_left(self, left: list[tuple[int, int]], needs: list[int], replaced: list[list[int]]) -> None:
        """Undo `add_left`."""
        for g, _ in left:
            needs[g] -= 1
            replaced[g].pop()

    def keep_left(self, sequence: BlockTables, g: int, block: int, length: int) -> None:
        """Cache a block that was replaced as the state after `length` tokens of an answer, in place of the one before.

        Its copy owns it until the step is dispatched.
        """
        assert self._checkpoints is not None
        if (g, block) not in self._step.sources:
            return  # it was not copied, so it is gone
        policy, size = sequence.request.groups[g]
        links = self._cache.chain(sequence, g).links
        self._remember(g, block, links[length // size - 1])
        before = policy.answer_end(length - 1, size)
        old = self._cache.find(g, links[before // size - 1]) if before else None
        if old is not None:
            self._checkpoints.drop(g, old)

    def install(
        self,
        sequence: BlockTables,
        num_tokens: int,
        taken: list[list[int]],
        replaced: list[list[int]],
        first_write: int,
    ) -> list[BlockCopy]:
        """Extend the tables to `num_tokens` with the blocks `taken` for each group, which first take the places of the
        logical ones `replaced`; return the copies to make."""
        copies = []
        for g, new_blocks in enumerate(taken):
            table, (policy, size) = sequence.tables[g], sequence.request.groups[g]
            for i in replaced[g]:
                old, table[i] = table[i], new_blocks.pop()
                if policy.holds(i, first_write, size):
                    copies.append(BlockCopy(g, old, table[i]))
                    self._step.reads(g, old)  # its other owners may give it up before the copy is made
                else:
                    # The time is never used: the block has other owners left.
                    self._allocator.release(g, old, EvictionKey(self.clock, 0), keep=False)
            if policy.appends:
                table += new_blocks
                continue
            added = range(len(table), policy.num_blocks(num_tokens, size))
            places = policy.placed(added, size)
            if len(places) < len(added):
                table += [NO_BLOCK] * len(added)
                for i, block in zip(places, new_blocks, strict=True):
                    table[i] = block
            else:
                table += new_blocks
        sequence.version = self.next_version()
        return copies

    def cache_full(self, sequence: BlockTables, token_ids: Sequence[int], num_known: int) -> None:
        """Cache the blocks that the first `num_known` tokens have filled since the last call."""
        if self._filled is None:
            for g, _, block, link in self._cache.newly_full(sequence, token_ids, num_known):
                self._remember(g, block, link)
            return
        request, states = sequence.request, self._checkpoints
        for g, i, block, link in self._cache.newly_full(sequence, token_ids, num_known):
            level, size = 0, request.groups[g][1]
            if request.retention is not None:  # a tier takes it before the request ends
                end = request.groups[g][0].prefix_end(i, size)
                if (asked := level_at(request.retention, end - 1)) is not None:
                    self._retention.note(g, link.digest, *asked)
            if states is not None and g in states.groups and states.is_unlikely(request.guess((i + 1) * size)):
                level = UNLIKELY
            self._remember(g, block, link, level)

    def _remember(self, g: int, block: int, link: Link, level: int = 0) -> bool:
        """Cache the content of a block in place of an equal, unused one; return False if the equal one is used.

        The tiers keep it at `level` where no request asks for another.

        So a prefix that was computed again is equally recent in all groups, although some may still have had it.
        """
        twin = self._cache.twin(g, link)
        if twin is not None:
            if self._allocator.groups[g].ref_count[twin]:
                return False
            kept = self._retention.get(g, link.digest)
            self._allocator.discard(g, twin)
            if kept is not None:
                self._retention.put(g, link.digest, kept)
        self._cache.insert(g, block, link)
        if self._filled is not None:
            self._filled(g, block, link, (g, block) not in self._step.filled, level)
        return True

    def share_all(self, sequence: BlockTables) -> None:
        """Count one more owner of every block in the tables."""
        for g, table in enumerate(sequence.tables):
            for block in table:
                if block != NO_BLOCK:
                    self._allocator.share(g, block)

    def release_inactive(self, sequence: BlockTables, length: int) -> None:
        """Release the blocks that no token from position `length` on will read."""
        self.clock += 1
        groups = sequence.request.groups if sequence.request.releases else ()
        for g, (policy, size) in enumerate(groups):
            self._cut(sequence, g, policy.most_blocks(length, size))
            runs = policy.active_blocks(length, size)
            first, first_active = sequence.released_below[g], runs[-1].start
            if first_active <= first:
                continue
            table = sequence.tables[g]
            # The gaps before and between the runs, the last first.
            gap_starts = [0, *(run.stop for run in runs[:-1])]
            for start, run in zip(reversed(gap_starts), reversed(runs), strict=True):
                gap = range(max(start, first), run.start)
                if self._aligned and policy.appends:
                    self._release_passed(sequence, g, gap, length)
                else:
                    self._release(sequence, g, gap, junction=sequence.request.junction if self._aligned else 0)
                for i in gap:
                    table[i] = NO_BLOCK
            sequence.released_below[g] = first_active
            sequence.version = self.next_version()
        if self._predicted is not None:
            self._trim()

    def _cut(self, sequence: BlockTables, g: int, most: int) -> None:
        """Release the entries of a table after the first `most`."""
        table = sequence.tables[g]
        if len(table) > most:
            self._release(sequence, g, range(most, len(table)))
            del table[most:]
            sequence.version = self.next_version()

    def release_all(self, sequence: BlockTables) -> None:
        """Release every block, tails before heads; those in the prefix cache stay, evictable."""
        self.clock += 1
        for g, table in enumerate(sequence.tables):
            self._release(sequence, g, range(len(table)))
        self._end_use()
        if self._recent is not None:
            self._recent.ended(sequence)
        if self._predicted is not None:
            self._predicted.ended(sequence)
            self._trim()

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

    def _end_use(self) -> None:
        """Give the states at `IN_USE` whose KV no sequence has any more the default level, as needed now."""
        groups = self._allocator.groups
        for (g, block), kv in list(self._in_use.items()):
            key = groups[g].evictable.get(block)
            if key is None or key.level != IN_USE:  # it is used, was evicted, or has another level by now
                del self._in_use[g, block]
                continue
            held = ((o, self._cache.find(o, link)) for o, link in kv)
            if not any(found is not None and groups[o].ref_count[found] for o, found in held):
                del self._in_use[g, block]
                self._allocator.requeue(g, block, EvictionKey(self.next_tick(), key.negative_end))

    def loaded(self) -> None:
        """Find the states at `IN_USE` in a pool that was restored: the next request to end frees them."""
        for g in () if self._checkpoints is None else self._checkpoints.groups:
            for block, key in self._allocator.groups[g].evictable.items():
                link = self._cache.link(g, block) if key.level == IN_USE else None
                if link is not None and not self._retention.level(g, link.digest):
                    self._in_use[g, block] = []

    def _release_passed(self, sequence: BlockTables, g: int, passed: range, length: int) -> None:
        """Release blocks that a window has passed; those that no prefix is likely to end near are evicted first.

        A later prompt begins where this one's end is near, where it parted from an earlier one or what it began with:
        there it needs the window before. Of other places there are many, and a sequence passes them later than an
        earlier one ended, whose last window would be evicted for them: none of several sessions would hit any more
        (vLLM, issue 48435).
        """
        request = sequence.request
        policy, size = request.groups[g]
        end = max(length, request.prompt_tokens or 0)
        parted = [prefix for prefix in ((request.begun or (0,))[0], request.parts_at) if prefix]
        first = policy.active_blocks(end, size)[0].start * size
        if not parted:  # the first of its kind: the next one may be another question about the same document
            for _ in range(MOST_WINDOWS - 1):
                if end - first < LAST_PART:
                    first = policy.active_blocks(first, size)[0].start * size
        wanted = [range(policy.active_blocks(first, size)[0].start, passed.stop)]
        for prefix in parted:
            wanted += policy.active_blocks(prefix, size)
        wanted += sequence.predicted[g]
        self._release(sequence, g, passed, {i for i in passed if not any(i in run for run in wanted)})

    def _release(
        self,
        sequence: BlockTables,
        g: int,
        logical: range,
        unlikely: Container[int] = frozenset(),
        junction: int = 0,
    ) -> None:
        """Release the blocks `logical` of a table, the longest prefix first.

        Args:
            unlikely: those that hardly any prefix will need.
            junction: tokens of the prefix whose state is worth more while the sequence runs; 0 = none.
        """
        tick, table = self.clock, sequence.tables[g]
        policy, size = sequence.request.groups[g]
        runs, release = sequence.predicted[g], self._allocator.release
        ranked = sequence.request.retention is not None or bool(self._retention)
        checkpoints = self._checkpoints if self._checkpoints is not None and g in self._checkpoints.groups else None
        is_plain = not (runs or ranked or unlikely or checkpoints is not None or self._in_use)
        for i in reversed(logical):
            if (block := table[i]) != NO_BLOCK:
                end = policy.prefix_end(i, size) if self._aligned else 0
                key, protect = EvictionKey(tick, -end), False
                cached = self._is_cached(sequence, g, i)
                if not is_plain:
                    key, protect = self._ranked(
                        sequence, g, i, key, cached, unlikely, 0 if checkpoints is None else junction
                    )
                release(g, block, key, cached, protect)
                if checkpoints is not None and cached:
                    guess = sequence.request.guess((i + 1) * size)
                    if guess is not None:
                        checkpoints.left(g, block, guess)

    def _ranked(
        self,
        sequence: BlockTables,
        g: int,
        logical: int,
        key: EvictionKey,
        cached: bool,
        unlikely: Container[int],
        junction: int,
    ) -> tuple[EvictionKey, bool]:
        """Return the key at the level of priority that a released block has from now on, and whether to protect it.

        Args:
            logical: number of the block in the table.
            key: its key without any level.
            cached: whether its content can be found.
            unlikely, junction: see `_release`.
        """
        block, (policy, size) = sequence.tables[g][logical], sequence.request.groups[g]
        end, retention, level = policy.prefix_end(logical, size), sequence.request.retention, 0
        protect = any(logical in run for run in sequence.predicted[g])
        if cached and (retention is not None or self._retention):
            level = self._level(retention, g, block, end)
        self._in_use.pop((g, block), None)
        if cached and not level and junction and end == junction and not protect:
            self._in_use[g, block] = self._kv_at(sequence, end)
            return key.at_level(IN_USE), protect
        if level or logical in unlikely:
            return key.at_level(level or UNLIKELY), False  # the user knows better than the prediction
        return key, protect

    def _level(self, retention: CacheRetention | None, g: int, block: int, end: int) -> int:
        """Return the level of priority of a cached block whose prefix ends at `end`, after noting what a request that
        releases it asks for."""
        link = self._cache.link(g, block)
        assert link is not None, "a cached block has a content"
        asked = None if retention is None else level_at(retention, end - 1)
        if asked is not None:
            self._retention.note(g, link.digest, *asked)
        return self._retention.level(g, link.digest)

    def end_priorities(self) -> None:
        """Give blocks whose priority has ended the default one, as if they were needed now."""
        for g, digest in self._retention.take_ended():
            block = self._cache.named(g, digest)
            key = None if block is None else self._allocator.groups[g].evictable.get(block)
            if block is not None and key is not None:
                self._allocator.requeue(g, block, EvictionKey(self.next_tick(), key.negative_end))

    def _is_cached(self, sequence: BlockTables, g: int, logical: int) -> bool:
        """Tell whether a block's content can be found. It is cached now if its twin was evicted or is unused."""
        block = sequence.tables[g][logical]
        if self._cache.holds(g, block):
            return True
        link = self._cache.content(sequence, g, logical)
        return link is not None and self._allocator.groups[g].ref_count[block] == 1 and self._remember(g, block, link)

    def _trim(self) -> None:
        """Make the oldest protected blocks ordinary, as the newest of these, while the protected pool is too full."""
        assert self._predicted is not None
        while (oldest := self._predicted.overflow()) is not None:
            self.clock += 1
            g, block, negative_end = oldest
            self._allocator.requeue(g, block, EvictionKey(self.clock, negative_end))
