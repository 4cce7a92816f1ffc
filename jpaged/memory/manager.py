"""Manages the block tables of all sequences over the two-level allocator and the prefix cache.

Decoding modes are built from three primitives (PagedAttention, section 5.2): fork, append (`allocate`) and
free. Blocks are shared by reference count and copied on the first diverging write only (section 4.4).

The file is long because it is the package's one interface: the mechanisms are in the parts that `clear` puts
together, and the questions and reports at its end are mostly one line each.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from jpaged.cache_retention import CacheRetention
from jpaged.memory import invariants
from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import NO_BLOCK, BlockTables, Leaves, RequestBlocks, Sequences, request_groups
from jpaged.memory.capacity import CapacityCheck, Fit, Lifetime, Need, ReclaimEstimate
from jpaged.memory.checkpoint_share import CheckpointShare
from jpaged.memory.copies import BlockCopy
from jpaged.memory.event_log import EventLog, MediumEvents
from jpaged.memory.eviction_listener import EvictionListener
from jpaged.memory.hash_chain import HashChain, Link, TokenSpan
from jpaged.memory.layout import PoolLayout
from jpaged.memory.map_tracker import MapTracker
from jpaged.memory.memory_map import MemoryMap
from jpaged.memory.miss_reasons import MissReasons
from jpaged.memory.pinned_blocks import PinnedBlocks
from jpaged.memory.policies import Policy
from jpaged.memory.prefix_cache import PrefixCache
from jpaged.memory.prefix_lookup import PrefixLookup
from jpaged.memory.prefix_prediction import PredictedPrefixes
from jpaged.memory.recent_prefixes import RecentPrefixes
from jpaged.memory.report import BlockCounts, MemoryReport, build_report
from jpaged.memory.retention import Retention
from jpaged.memory.salt_limits import SaltLimits
from jpaged.memory.shared_blocks import shared_blocks
from jpaged.memory.step_blocks import StepBlocks
from jpaged.memory.swap import SwapSpace
from jpaged.memory.table_updater import TableUpdater
from jpaged.memory.tiers import Content, Prefix, Tiers

PrefixEviction = Literal["lru", "aligned", "predicted"]


class MemoryParts(NamedTuple):
    """The live parts of a memory, for saving and for tests. `MemoryManager.clear` makes new ones.

    Attributes:
        groups: policy and block size (tokens) of each layer group.
        allocator: the state of the pool's blocks.
        cache: the contents of full blocks.
        updater: puts blocks into tables; it has the clock of evictions and the version of tables.
        requests: the state that the sequences of a request share, by request id.
        sequences: block tables of the sequences in the pool, by sequence id; those of swapped ones are
            `MemoryManager.swap_space`'s.
        pinned: the sequences that stay for good.
        recent: the prefixes of recent requests; None = nothing needs them.
        predicted: chooses the protected ones; None = none.
        retention: the priorities that requests gave to cached contents.
        checkpoints: bounds cached states; None = no layers keep any.
    """

    groups: Sequence[tuple[Policy, int]]
    allocator: BlockAllocator
    cache: PrefixCache
    updater: TableUpdater
    requests: dict[int, RequestBlocks]
    sequences: Sequences
    pinned: PinnedBlocks
    recent: RecentPrefixes | None
    predicted: PredictedPrefixes | None
    retention: Retention
    checkpoints: CheckpointShare | None


class MemoryManager:
    """Block tables, reference counts, copy-on-write and prefix hits of all sequences on one pool.

    Args:
        layout: how the pool is cut.
        watermark: share of the large pages kept free at admission, so that running sequences can still grow
            (PagedAttention's system keeps 1 %).
        prefix_caching: keep the content of full blocks for later requests.
        swap_space_bytes: host memory that swapped sequences may take, as bytes of one device; 0 = none.
        prefix_eviction: the order in which cached blocks are evicted. "lru": least recently needed first, each group on
            its own. "aligned": "lru" and, among equals, the longest prefix first, so that all groups lose the same
            tokens (Jenga). "predicted": "aligned", and blocks of prefixes that recent requests shared are also
            protected from new requests, as far as that pays, see `PredictedPrefixes`.
        max_step_tokens: most tokens a sequence computes in one step. It bounds what a windowed group needs at
            admission; without it a whole prompt is taken to be computed at once.
        tiers: keep cached blocks outside of the pool; None = evicted ones are lost. They need prefix caching.
        cache_salt_bytes: most bytes of cached blocks without an owner of one cache salt, see `SaltLimits`; None = no
            limit. Prompts without a salt have none.
        clock: a monotonic clock in seconds, on which priorities end.

    Attributes:
        swap_space: the swapped sequences and their host memory.
        misses: counts why prompt tokens were not found, over its whole life.
        shared: the blocks of layer groups whose contents belong to no sequence (images, adapters), by their kinds.

    Raises:
        ValueError: when the watermark is outside [0, 1), or swap_space_bytes outside [0, bytes of the pool].
    """

    def __init__(
        self,
        layout: PoolLayout,
        *,
        watermark: float = 0.0,
        prefix_caching: bool = False,
        max_step_tokens: int | None = None,
        swap_space_bytes: int = 0,
        prefix_eviction: PrefixEviction = "aligned",
        tiers: Tiers | None = None,
        cache_salt_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= swap_space_bytes <= layout.pool_bytes:
            raise ValueError(f"swap_space_bytes={swap_space_bytes:,} is outside [0, {layout.pool_bytes:,}], the pool")
        if prefix_eviction not in get_args(PrefixEviction):
            raise ValueError(f"prefix_eviction={prefix_eviction!r} is not one of {', '.join(get_args(PrefixEviction))}")
        self.layout = layout
        self.tiers = tiers
        self.prefix_caching = prefix_caching
        self.max_step_tokens = max_step_tokens
        self._watermark = watermark
        self._swap_space_bytes = swap_space_bytes
        self._prefix_eviction = prefix_eviction
        self._generation = 0
        self._cache_salt_bytes = cache_salt_bytes
        self._clock = clock
        self._tracker: MapTracker | None = None
        self._watch: MediumEvents | None = None
        self.misses = MissReasons(layout)
        self._groups = [
            (policy.for_pool(group.num_blocks) if prefix_caching else policy.for_prefix(0, 0), group.spec.block_size)
            for group in layout.groups
            for policy in [group.spec.policy]
        ]
        self.clear()

    def clear(self) -> None:
        """Forget every sequence, pin, swapped block and all content of the pool, in whatever state an exception left
        them. The tiers keep theirs.

        The contents of the pool and of swapped blocks mean nothing afterwards.
        """
        layout = self.layout
        self.misses.forget()
        self._cache = PrefixCache(self._groups)
        self._cache.generation = self._generation
        self._cache.watch = self._watch
        if self._watch is not None:
            self._watch.cleared()
        self._retention = retention = Retention(len(layout.groups), self._clock)
        if self.tiers is not None:
            self.tiers.begin_pool(self._content, retention)
        self._listener = listener = EvictionListener(self._cache, self.tiers)
        self._allocator = BlockAllocator(
            [group.blocks_per_page for group in layout.groups],
            layout.num_pages,
            listener.evicted,
            listener.discard_torn,
        )
        listener.retention = retention
        if self._cache_salt_bytes is not None:
            sizes = [group.block_bytes for group in layout.groups]
            self._allocator.watch = SaltLimits(self._cache_salt_bytes, sizes, self._cache, self._allocator.discard)
        # Policies with optional blocks place checkpoints where recent requests' shared prefixes end, among others.
        states = [g for g, (policy, _) in enumerate(self._groups) if policy.optional_blocks]
        self._checkpoints = CheckpointShare(layout, self._allocator, states) if states else None
        self._step = StepBlocks(self._allocator, self._cache, self._checkpoints)
        predicts = self.prefix_caching and self._prefix_eviction == "predicted"
        self._requests: dict[int, RequestBlocks] = {}
        self._recent = recent = RecentPrefixes(layout, self._requests) if predicts or states else None
        self._predicted = PredictedPrefixes(layout, self._allocator, recent) if predicts and recent else None
        aligned = self._prefix_eviction != "lru"
        self._updater = TableUpdater(
            self._allocator,
            self._cache,
            self._step,
            aligned=aligned,
            recent=recent,
            predicted=self._predicted,
            checkpoints=self._checkpoints,
            filled=None if self.tiers is None else self.tiers.filled,
            retention=retention,
        )
        self.shared = shared_blocks(
            layout, self._allocator, self._updater.next_tick, prefix_caching=self.prefix_caching
        )
        listener.shared = {blocks.group: blocks for blocks in self.shared.values()}
        if self.tiers is not None:
            for blocks in self.shared.values():
                blocks.on_filled = self.tiers.filled
        listener.predicted, listener.step, listener.checkpoints = self._predicted, self._step, self._checkpoints
        self._lookup = PrefixLookup(
            self._groups,
            self._allocator,
            self._cache,
            self._updater,
            self._step,
            recent=recent,
            predicted=self._predicted,
            checkpoints=self._checkpoints,
            prefix_step=layout.prefix_step,
            tiers=self.tiers,
        )
        self._sequences = Sequences()
        self._pinned = PinnedBlocks(layout, self._cache, self._sequences)
        self._capacity = CapacityCheck(
            layout,
            self._groups,
            self._allocator,
            self._sequences,
            self._pinned,
            self._step,
            watermark=self._watermark,
            max_step_tokens=self.max_step_tokens,
        )
        self.swap_space = SwapSpace(
            layout,
            self._allocator,
            self._updater,
            self._step,
            self._sequences,
            limit_bytes=self._swap_space_bytes,
            capacity=self._capacity,
            tiers=self.tiers,
        )

    @property
    def parts(self) -> MemoryParts:
        """Return the live parts."""
        return MemoryParts(
            self._groups,
            self._allocator,
            self._cache,
            self._updater,
            self._requests,
            self._sequences,
            self._pinned,
            self._recent,
            self._predicted,
            self._retention,
            self._checkpoints,
        )

    def log_events(self, log: EventLog, replica: int) -> None:
        """Add the changes of cached blocks to a log from now on, those of the tiers too, beginning with what they
        have."""
        self._watch = self._cache.watch = MediumEvents(log, "device", replica)
        for g in range(len(self._groups)):
            for link in self._cache.contents(g).values():
                self._watch.stored(g, link)
        for tier in () if self.tiers is None else self.tiers.each:
            tier.index.watch_by(MediumEvents(log, tier.name, replica))

    def empty_copy(self, layout: PoolLayout, *, swap_space_bytes: int) -> MemoryManager:
        """Return an empty memory without tiers on another pool of the same layer groups; its other settings are
        equal."""
        return MemoryManager(
            layout,
            watermark=self._watermark,
            prefix_caching=self.prefix_caching,
            max_step_tokens=self.max_step_tokens,
            swap_space_bytes=swap_space_bytes,
            prefix_eviction=self._prefix_eviction,
            clock=self._clock,
        )

    # The life of a sequence.

    def add(
        self,
        seq_id: int,
        request_id: int,
        *,
        encoder_tokens: int = 0,
        prompt_tokens: int | None = None,
        kept_tokens: int = 0,
        retention: CacheRetention | None = None,
        marks: Sequence[int] = (),
    ) -> None:
        """Add a sequence with empty tables; its blocks will be placed in the pages of its request.

        Args:
            encoder_tokens: number of tokens of an encoder whose KV cross-attention layers keep in the tables;
                all its sequences have the same number.
            prompt_tokens: length of the request's prompt; layers that drop tokens at a prompt's end do so only where it
                is given.
            kept_tokens: leading tokens of the prompt that are to be found as a prefix once they are computed, a
                multiple of the layout's `prefix_step`; 0 = wherever the policies see fit.
            retention: what the request asks of the prefix cache; its breakpoints are the caller's.
            marks: lengths, in tokens, after which later prompts may part from this one, the likeliest first.

        Raises:
            ValueError: the sequence exists, the request has another number of encoder tokens, or no layer reads any.
        """
        self._new_id(seq_id)
        request = self._requests.get(request_id)
        if request is None:
            placed = self._allocator.new_request()
            request = RequestBlocks(request_id, placed, self._groups, encoder_tokens, prompt_tokens, kept_tokens, marks)
            request.retention = retention
            self._requests[request_id] = request
        elif request.encoder_tokens != encoder_tokens:
            raise ValueError(
                f"encoder_tokens={encoder_tokens} is not the number of the request's other sequences, "
                f"{request.encoder_tokens}"
            )
        request.num_seqs += 1
        self._sequences[seq_id] = BlockTables(request, self._cache.chains(), self._updater.next_version())

    def match_prefix(
        self,
        seq_id: int,
        token_ids: Sequence[int],
        *,
        salt: Hashable = None,
        spans: Sequence[TokenSpan] = (),
        max_tokens: int | None = None,
        from_tiers: bool = False,
        chains: Mapping[int, HashChain] | None = None,
    ) -> int:
        """Attach the cached blocks of the longest prefix of `token_ids` that is valid for every group.

        Args:
            seq_id: a sequence with empty tables.
            token_ids: all tokens to be computed; the sequence keeps to them.
            salt: anything with a stable repr that keeps tenants, adapters or images apart. It also marks the blocks
                that this sequence will put into the cache: give it even where no hit is wanted (``max_tokens=0``).
            spans: tokens that stand for images, in order; they mark the blocks too.
            max_tokens: upper bound on the hit.
            from_tiers: whether blocks that were read from tiers for the request count as cached. They take blocks of
                the pool, which have to be filled before the step's chunks run.
            chains: the names of the blocks, see `chains`, made with the same salt and spans for a prompt that begins
                with the same tokens; tiers are not asked then. None = they are computed.

        Returns:
            Cached tokens: a multiple of every block size, at most ``len(token_ids) - 1``, so that the last
            token is computed and yields logits, and never inside a whole image; 0 without prefix caching.

        Raises:
            RuntimeError: when the sequence already has blocks.
        """
        sequence = self._sequences[seq_id]
        if any(sequence.tables):
            raise RuntimeError(f"sequence {seq_id} has blocks already: match its prefix before allocating")
        if not self.prefix_caching:
            return 0
        limit = len(token_ids) - 1 if max_tokens is None else min(len(token_ids) - 1, max_tokens)
        if chains is not None:
            return self._lookup.attach_named(sequence, chains, token_ids, max(limit, 0), spans)
        return self._lookup.attach(sequence, token_ids, max(limit, 0), salt=salt, spans=spans, from_tiers=from_tiers)

    def chains(
        self, seq_id: int, token_ids: Sequence[int], *, salt: Hashable = None, spans: Sequence[TokenSpan] = ()
    ) -> dict[int, HashChain]:
        """Return the names of a prompt's blocks, for `match_prefix` and `name_of_prefix`: those of a sequence that has
        the prompt, where it still has blocks, and else computed ones."""
        made, sequence = self._cache.chains(salt, spans), self._sequences.get(seq_id)
        if sequence is not None and all(sequence.chains[key].root == chain.root for key, chain in made.items()):
            made = {key: chain.copy() for key, chain in sequence.chains.items()}  # of the present weights
        for g, (policy, size) in enumerate(self._groups):
            if policy.names_tokens:
                self._cache.links(made, g, token_ids, len(token_ids) // size)
        return made

    def name_of_prefix(self, chains: Mapping[int, HashChain], num_tokens: int) -> bytes:
        """Return a name of the first `num_tokens` tokens of a prompt, a multiple of the layout's `prefix_step`."""
        size = max(chains)
        return chains[size].links[num_tokens // size - 1].digest

    def admitted(self, seq_id: int) -> None:
        """Learn from the request of a sequence that has its prefix and begins to run: which prefixes come again, and
        where prompts part.

        `match_prefix` alone teaches nothing, as a request that waits for room is matched in every step. A request is
        learnt from once, however often this is called.
        """
        self._lookup.learn(self._sequences[seq_id])

    def leave_less(self, seq_id: int, leaves: Leaves = Leaves.LESS) -> bool:
        """Make a sequence that has its cached prefix and nothing else leave no more than `leaves` for later requests;
        return whether it takes less room so."""
        sequence = self._sequences.get(seq_id)
        return sequence is not None and sequence.request.leave_less(leaves)

    def leaves(self, seq_id: int) -> Leaves:
        """Return what a sequence leaves for later requests."""
        return self._sequences[seq_id].request.leaves

    def leave_all(self, seq_id: int) -> None:
        """Undo `leave_less`, at once."""
        self._sequences[seq_id].request.leave_all()

    def allocate(self, seq_id: int, num_tokens: int, *, first_write: int) -> list[BlockCopy] | None:
        """Give a sequence slots for positions [0, `num_tokens`), of which [`first_write`, `num_tokens`) get written.

        A shared block that would be written is replaced by one of the sequence's own; if it holds earlier
        tokens the device must copy it first: at most one block a group, the partial tail (all blocks of a
        `TokenBudget`). The last owner writes in place.

        Returns:
            The copies to make before the step, whose sources keep an owner until `dispatched` or `cancel`, or None when
            memory is short: then nothing has changed.

        Raises:
            ValueError: when positions before `first_write` have no slot, or one to be written was released.
        """
        sequence = self._sequences[seq_id]
        needs, replaced = self._updater.missing_blocks(sequence, num_tokens, first_write)
        taken: list[list[int]] | None = [[] for _ in needs]
        if any(needs):
            taken = self._allocator.take(needs, sequence.request.open_pages)
        if taken is None:
            return None
        states = []
        if self._checkpoints is not None:
            states = self._updater.add_answer_states(sequence, first_write, taken, replaced)
        if any(taken):
            copies = self._updater.install(sequence, num_tokens, taken, replaced, first_write)
            for g, block in states:
                self._updater.keep_answer_state(sequence, g, block, first_write)
        else:
            copies = []
        sequence.num_slots = max(sequence.num_slots, num_tokens)
        if self.prefix_caching and first_write < num_tokens:
            self._cache.overwrite(sequence, first_write, num_tokens)
        return copies

    def commit(self, seq_id: int, token_ids: Sequence[int], num_computed: int) -> bool:
        """Record that the first `num_computed` tokens have KV once the steps dispatched so far have run.

        Newly full blocks become known to the prefix cache, blocks that left every window are released. Do not
        commit tokens of a step that is still being planned: a block released here may go to another sequence at
        once, and that step would both read and overwrite it.

        Args:
            token_ids: all tokens the host knows; may end before `num_computed` while one is in flight, then
                only blocks known to the end are cached.

        Returns:
            Whether a table changed, because a block of it was released.
        """
        sequence = self._sequences[seq_id]
        known, version = min(num_computed, len(token_ids)), sequence.version
        if sequence.committed == (version, known, num_computed):
            return False  # as where the next block is asked for right after a token was committed
        sequence.num_computed = num_computed
        if self.prefix_caching:
            self._updater.cache_full(sequence, token_ids, known)
        self._updater.release_inactive(sequence, num_computed)
        sequence.committed = sequence.version, known, num_computed
        return sequence.version != version

    def cancel(self, copies: Sequence[BlockCopy]) -> None:
        """Note that copies of the step in planning are not made."""
        self._step.cancel(copies, self._updater.clock)

    def dispatched(self) -> None:
        """Note that the device has the step that was planned: blocks that it only reads are released, and content that
        it sends to another tier counts as sent."""
        self._updater.levels.end_priorities()
        self.swap_space.dispatched(self._step.dispatched(self._updater.clock))
        if self.tiers is not None:
            self.tiers.dispatched()

    def fork(self, parent_id: int, child_id: int) -> None:
        """Add a sequence of the same request that shares every block of its parent.

        The child of a swapped sequence is swapped too.

        Raises:
            ValueError: when the child exists.
        """
        self._new_id(child_id)
        swapped = self.swap_space.sequences.get(parent_id)
        child = (swapped or self._sequences[parent_id]).fork(self._updater.next_version())
        child.request.num_seqs += 1
        if swapped is not None:
            self.swap_space.fork(child_id, child)
            return
        self._updater.share_all(child)
        self._sequences[child_id] = child

    def adopt(
        self, seq_id: int, token_ids: Sequence[int], places: Sequence[Sequence[int]], *, salt: Hashable = None
    ) -> list[list[tuple[int, int]]] | None:
        """Add a sequence that owns the blocks of a prefix whose content comes from elsewhere.

        The prefix cache finds them from now on, so they have to be filled before the next step, and the sequence freed.

        Args:
            token_ids: the tokens of the prefix, a whole number of blocks of every group.
            places: numbers of the logical blocks of each group that there is content for.

        Returns:
            For each group, the places (their positions in `places`) that the pool lacked, and their blocks; None, with
            nothing changed, when memory is short.

        Raises:
            ValueError: there is no prefix cache, or content for other blocks than the layers read.
        """
        if not self.prefix_caching:
            raise ValueError("a prefix can be loaded only with enable_prefix_caching=True")
        self.add(seq_id, -1 - seq_id)
        try:
            taken = self._lookup.adopt(self._sequences[seq_id], token_ids, places, salt)
        except ValueError:
            self.free(seq_id)
            raise
        if taken is None:
            self.free(seq_id)
        return taken

    def drop_adopted(self, seq_id: int) -> None:
        """Free a sequence of `adopt` whose blocks were not filled: their content is found no more."""
        tables = [list(table) for table in self._sequences[seq_id].tables]
        for g, table in enumerate(tables):
            for block in table:
                if block != NO_BLOCK and self._allocator.groups[g].ref_count[block] == 1:
                    self._cache.forget(g, block)
        self._sequences[seq_id].num_hashed = [0] * len(tables)
        self.free(seq_id)

    def pack(self, seq_id: int) -> None:
        """Place future blocks of the sequence's request where they open the fewest large pages."""
        sequence = self.swap_space.sequences.get(seq_id) or self._sequences[seq_id]
        sequence.request.open_pages.packed = True

    def free(self, seq_id: int) -> None:
        """Free the blocks of a sequence, tails before heads; those in the prefix cache stay, evictable.

        A swapped sequence frees its host blocks.
        """
        if self.swap_space.holds(seq_id):
            sequence = self.swap_space.free(seq_id)
        else:
            sequence = self._sequences[seq_id]
            if self.prefix_caching:
                self.misses.ended(sequence)
            self._updater.release_all(sequence)
            del self._sequences[seq_id]
        if seq_id in self._pinned.seq_ids:
            self._pinned.remove(seq_id)
        request = sequence.request
        request.num_seqs -= 1
        if request.num_seqs == 0:
            del self._requests[request.request_id]

    def pin(self, seq_id: int) -> None:
        """Keep the blocks of a sequence until it is freed: admission counts their pages as taken for good."""
        self._pinned.add(seq_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content, in the tiers too; refused (False) while any block is in use."""
        if any(group.num_used for group in self._allocator.groups):
            return False
        self._listener.forget(self._allocator)
        self.misses.forget()
        return True

    def new_generation(self) -> None:
        """Forget cached content because the weights change: no later request finds a block that the old ones computed,
        not even one of a sequence that goes on."""
        self._generation = self._cache.generation = self._cache.generation + 1
        self.misses.forget()
        self._listener.forget(self._allocator)
        if self.tiers is not None:
            self.tiers.renew(secrets.token_bytes(16))

    def take_vacated_pages(self, *, at_once: bool = False) -> list[int]:
        """Return the large pages whose memory may go: used once, and since the last call they held no used or cached
        block. `at_once` adds those that hold none now."""
        return self._allocator.pages.take_vacated(at_once=at_once)

    def holds(self, seq_id: int) -> bool:
        """Tell whether a sequence has block tables, in the pool or in host memory."""
        return seq_id in self._sequences or self.swap_space.holds(seq_id)

    def evict_idle_page(self) -> bool:
        """Forget the least recently needed large page that nothing uses; return False where there is none."""
        evicted = self._allocator.evict_idle_page()
        if evicted:
            self._listener.discard_torn()
        return evicted

    # Questions of admission; they change no block.

    def is_possible(self, lifetime: Lifetime, *, pinned_tokens: int = 0, pinned_pages: int | None = None) -> bool:
        """Tell whether a request can grow to its full length in a pool with nothing but pinned blocks, above the
        watermark.

        Args:
            pinned_tokens: leading tokens that lie in pinned blocks, see `pinned_prefix`.
            pinned_pages: large pages that stay pinned; None = all that are.
        """
        return self._capacity.is_possible(lifetime, pinned_tokens=pinned_tokens, pinned_pages=pinned_pages)

    def is_tight(self, lifetime: Lifetime) -> bool:
        """Tell whether a request is sure to fit the pool alone only if its blocks are packed, see `pack`."""
        return self._capacity.is_tight(lifetime)

    def can_admit(
        self,
        need: Need,
        *,
        reserved: Sequence[int] | None = None,
        may_wait: bool | None = None,
        reclaimed: ReclaimEstimate | None = None,
    ) -> Fit:
        """Tell whether a request fits, in large pages over all groups.

        Args:
            need: the blocks that it takes now.
            reserved: blocks of each group that others have yet to take, see `outstanding`.
            may_wait: whether LATER is an answer rather than the loss of protected blocks; None = it is while there are
                sequences that are not pinned.
            reclaimed: blocks that would be freed first, see `reclaim_estimate`; None = none.

        Returns:
            NEVER when it could not fit a pool with nothing but pinned blocks above the watermark; OK when it fits now;
            else LATER.
        """
        return self._capacity.verdict(need, reserved=reserved, may_wait=may_wait, reclaimed=reclaimed)

    def reclaim_estimate(self) -> ReclaimEstimate:
        """Return an estimate of the blocks that preemption would free: none until requests are added to it."""
        return ReclaimEstimate(self._allocator, self._sequences)

    def outstanding(self, seq_id: int, num_tokens: int) -> list[int]:
        """Return how many blocks of each group a sequence has yet to take until `num_tokens` tokens are computed.

        A swapped one takes them in addition to the blocks that it needs to come back.
        """
        swapped = self.swap_space.sequences.get(seq_id)
        if swapped is not None:
            return self._capacity.outstanding(swapped, num_tokens, is_swapped=True)
        return self._capacity.outstanding(self._sequences[seq_id], num_tokens)

    def outstanding_fork(self, parent_id: int, num_tokens: int, shared_tokens: int) -> list[int]:
        """Return the same as `outstanding` for a sequence that is still to be forked from the first `shared_tokens`
        tokens of another."""
        parent = self.swap_space.sequences.get(parent_id) or self._sequences[parent_id]
        return self._capacity.outstanding_fork(parent, num_tokens, shared_tokens)

    def pinned_prefix(
        self,
        token_ids: Sequence[int],
        *,
        salt: Hashable = None,
        encoder_tokens: int = 0,
        spans: Sequence[TokenSpan] = (),
    ) -> int:
        """Return how many leading tokens of a prompt are sure to be found, because they lie in pinned blocks."""
        return self._pinned.prefix(token_ids, salt, encoder_tokens, spans) if self.prefix_caching else 0

    def tier_tokens(self, seq_id: int) -> Mapping[str, int]:
        """Return how many leading tokens of a sequence's request were found in each tier below the pool."""
        return self._sequences[seq_id].request.tier_tokens

    def cached_prefix(self, token_ids: Sequence[int], *, salt: Hashable = None, spans: Sequence[TokenSpan] = ()) -> int:
        """Return how many tokens `match_prefix` would attach now; nothing is attached."""
        return self._lookup.cached(token_ids, salt, spans) if self.prefix_caching else 0

    def note_misses(self, seq_id: int, prompt_tokens: int, *, computes_all: bool = False) -> None:
        """Count, by their reasons, the tokens of a prompt that `match_prefix` has just not found for a sequence.

        Args:
            computes_all: whether the request computes them even where they are cached.
        """
        if not self.prefix_caching or computes_all:
            self.misses.off(prompt_tokens)
        else:
            self.misses.missed(self._sequences[seq_id], self._cache, prompt_tokens)

    def prefix_to_come(self, seq_id: int, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens of a sequence can be found as a prefix once it has computed
        them, at most."""
        if not self.prefix_caching:
            return 0
        return self._sequences[seq_id].request.prefix_to_come(num_tokens, self.layout.prefix_step)

    def read_ahead(
        self,
        request_id: int,
        token_ids: Sequence[int],
        now: float,
        *,
        salt: Hashable = None,
        spans: Sequence[TokenSpan] = (),
        encoder_tokens: int = 0,
        prompt_tokens: int | None = None,
        contents: Callable[[], Sequence[Content]] | None = None,
        is_next: bool = False,
    ) -> None:
        """Begin to read blocks from tiers that `match_prefix` would not find in the pool, where that is worth it.

        Args:
            contents: returns those that the request will hold, such as images' features; None = there are none.
            now, is_next: see `Prefetch.look`.
        """
        if self.tiers is None or not self.prefix_caching:
            return
        groups = request_groups(self._groups, encoder_tokens, prompt_tokens)
        prefix = Prefix(token_ids, max(len(token_ids) - 1, 0), groups, self._cache.chains(salt, spans), spans, contents)
        self.tiers.prefetch.look(request_id, prefix, self._cache, now, is_next=is_next)

    # Counts, tables and reports.

    def free_blocks(self, group: int) -> int:
        """Return how many blocks `group` could get if no other group took any."""
        blocks = self._allocator.groups[group]
        return blocks.spare + self._allocator.pages.num_available * blocks.blocks_per_page

    @property
    def keeps_states(self) -> bool:
        """Return whether prefixes end where states are kept, so that it helps to know where later prompts part."""
        return self._checkpoints is not None

    @property
    def num_used_blocks(self) -> int:
        """Return how many blocks sequences and what requests hold have, over all groups."""
        return sum(group.num_used for group in self._allocator.groups)

    @property
    def block_counts(self) -> tuple[BlockCounts, ...]:
        """Return the blocks of each group by state. O(groups)."""
        return tuple(
            BlockCounts(plan.spec.name, state.num_used, len(state.evictable) + len(state.protected), state.num_empty)
            for plan, state in zip(self.layout.groups, self._allocator.groups, strict=True)
        )

    @property
    def num_available_pages(self) -> int:
        """Return how many large pages hold nothing in use: free ones, and those with cached blocks only."""
        return self._allocator.pages.num_available

    def capacity(self, seq_id: int) -> int:
        """Return how many tokens the sequence's tables can hold without a new block, the least over groups."""
        return self._sequences[seq_id].num_reserved()

    def block_table(self, seq_id: int, group: int) -> list[int]:
        """Return logical to physical block, `NO_BLOCK` where released. It is the manager's own list: do not write to
        it."""
        return self._sequences[seq_id].tables[group]

    def report(self, lengths: Mapping[int, int] | None = None) -> MemoryReport:
        """Return the state of the pool. O(blocks in use).

        Args:
            lengths: tokens with KV by sequence id, where the caller knows better than the last `commit`.
        """
        return build_report(
            self.layout,
            self._allocator,
            self._sequences,
            lengths or {},
            self.swap_space.host,
            self._pinned.seq_ids,
            self.shared.values(),
            self._checkpoints,
        )

    def map(self, lengths: Mapping[int, int] | None = None) -> MemoryMap:
        """Return every large page and block. O(pool) the first time, then O(changes since).

        Args:
            lengths: as for `report`.
        """
        if self._tracker is None or self._tracker.allocator is not self._allocator:
            self._tracker = MapTracker(self.layout, self._allocator, self._cache, self._sequences)
        tracker, self._tracker = self._tracker, None  # an exception in between (Ctrl-C) leaves no half-changed tracker
        found = tracker.take(self._updater.clock, lengths or {})
        self._tracker = tracker
        return found

    def check_invariants(self) -> None:
        """Recompute every count from the tables. O(pool); for tests.

        Raises:
            AssertionError: a count is wrong; the message names the group, page or block.
        """
        invariants.check(self._allocator, self._cache, self._sequences.values(), self.shared.values(), self._step)
        self.swap_space.check()
        if self.tiers is not None:
            self.tiers.check()

    def _content(self, g: int, block: int) -> Link | None:
        """Return the known content of a block."""
        shared = self._listener.shared.get(g)
        return self._cache.link(g, block) if shared is None else shared.link(block)

    def _new_id(self, seq_id: int) -> None:
        if self.holds(seq_id):
            raise ValueError(f"sequence {seq_id} exists already")
