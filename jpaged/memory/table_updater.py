"""Puts blocks into the tables of sequences and takes them out again; every count stays true."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import NO_BLOCK, BlockTables
from jpaged.memory.checkpoint_share import CheckpointShare, Guess
from jpaged.memory.copies import BlockCopy
from jpaged.memory.eviction_key import EvictionKey
from jpaged.memory.eviction_levels import UNLIKELY, EvictionLevels, unlikely_blocks
from jpaged.memory.hash_chain import Link
from jpaged.memory.prefix_cache import PrefixCache
from jpaged.memory.prefix_prediction import PredictedPrefixes
from jpaged.memory.recent_prefixes import RecentPrefixes
from jpaged.memory.retention import Retention, level_at
from jpaged.memory.step_blocks import StepBlocks


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
        levels: ranks released blocks.
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
        self.levels = EvictionLevels(allocator, cache, retention, checkpoints, self.next_tick)
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
            blocks = [block for block in tables[g] if block != NO_BLOCK]
            self._allocator.share_all(g, blocks)
            if self._checkpoints is not None and g in self._checkpoints.groups:
                for block in blocks:
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

    def add_answer_states(
        self, sequence: BlockTables, length: int, taken: list[list[int]], replaced: list[list[int]]
    ) -> list[tuple[int, int]]:
        """Add to what an append took a block for each one that holds the state after `length` tokens of an answer,
        which the append would change; return these as (group, block).

        Only tokens that are known name a state: where one of them is in flight, it is not kept. Nor is it where a block
        of a higher level would be evicted for it, and nothing is preempted for a later request's sake.
        """
        assert self._checkpoints is not None
        states = []
        for g in self._checkpoints.of_answers:
            policy, size = sequence.request.groups[g]
            if policy.answer_end(length, size) != length or length // size > sequence.num_hashed[g]:
                continue
            entry, table = policy.num_blocks(length, size) - 1, sequence.tables[g]
            if (entry + 1) * size == length or entry in replaced[g] or entry >= len(table):
                continue
            link = self._cache.chain(sequence, g).links[length // size - 1]
            hardly = self._aligned and self._checkpoints.is_unlikely(Guess.AT_END)
            if self._cache.twin(g, link) is None and self.levels.may_keep_answer(
                sequence, g, length, is_unlikely=hardly
            ):
                one = [int(other == g) for other in range(len(taken))]
                if (block := self._allocator.take(one, sequence.request.open_pages)) is not None:
                    taken[g] += block[g]
                    replaced[g].append(entry)
                    states.append((g, table[entry]))
        return states

    def keep_answer_state(self, sequence: BlockTables, g: int, block: int, length: int) -> None:
        """Cache a block that was replaced as the state after `length` tokens of an answer, in place of the one before.

        Its copy owns it until the step is dispatched.
        """
        assert self._checkpoints is not None
        if (g, block) not in self._step.sources:
            return  # it was not copied, so it is gone
        policy, size = sequence.request.groups[g]
        links = self._cache.chain(sequence, g).links
        link, hardly = links[length // size - 1], self._checkpoints.is_unlikely(Guess.AT_END)
        level = self.levels.of_answer(sequence, g, link, length, is_unlikely=hardly and self._aligned)
        self._step.levels[g, block] = level
        self._remember(g, block, link, UNLIKELY if hardly else 0)
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
            self._allocator.share_all(g, [block for block in table if block != NO_BLOCK])

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
                    self._release(sequence, g, gap, unlikely_blocks(sequence, g, gap, length))
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
        self.levels.end_use()
        if self._recent is not None:
            self._recent.ended(sequence)
        if self._predicted is not None:
            self._predicted.ended(sequence)
            self._trim()

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
        release, levels, ref_count = self._allocator.release, self.levels, self._allocator.groups[g].ref_count
        checkpoints = self._checkpoints if self._checkpoints is not None and g in self._checkpoints.groups else None
        is_plain = not unlikely and checkpoints is None and levels.are_plain(sequence, g)
        owned: list[int] = []  # by others too, the last of which says when they were needed
        for i in reversed(logical):
            if (block := table[i]) == NO_BLOCK:
                continue
            if is_plain and ref_count[block] > 1:
                owned.append(block)
                continue
            end = policy.prefix_end(i, size) if self._aligned else 0
            key, protect = EvictionKey(tick, -end), False
            cached = self._is_cached(sequence, g, i)
            guess = None if checkpoints is None or not cached else sequence.request.guess((i + 1) * size)
            if not is_plain:
                at = 0 if checkpoints is None else junction
                hardly = i in unlikely or (checkpoints is not None and self._aligned and checkpoints.is_unlikely(guess))
                key, protect = levels.ranked(
                    sequence, g, i, key, is_cached=cached, is_unlikely=hardly, junction=at, guess=guess
                )
            release(g, block, key, cached, protect)
            if checkpoints is not None and guess is not None and not levels.is_in_use(g, block):
                checkpoints.left(g, block, guess)
        self._allocator.release_owned(g, owned)

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
