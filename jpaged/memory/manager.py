"""Who owns which block: the block tables of every sequence over the two-level allocator and the prefix cache.

Decoding modes are built from three primitives (PagedAttention, section 5.2): fork, append (`allocate`) and
free. Blocks are shared by reference count and copied on the first diverging write only (section 4.4).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, get_args

from jpaged.memory.admission import Admission, Fit
from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import NO_BLOCK, BlockTables, Request, Sequences
from jpaged.memory.copies import BlockCopy
from jpaged.memory.layout import PoolLayout
from jpaged.memory.ownership import Ownership
from jpaged.memory.predicted_prefixes import PredictedPrefixes
from jpaged.memory.prefix_cache import PrefixCache
from jpaged.memory.state import MemoryState
from jpaged.memory.swap import SwapSpace

PrefixEviction = Literal["lru", "aligned", "predicted"]


class MemoryManager(MemoryState):
    """Block tables, reference counts, copy-on-write and prefix hits of all sequences on one pool.

    Args:
        layout: how the pool is cut.
        watermark: share of the large pages kept free at admission, so that running sequences can still grow
            (PagedAttention's system keeps 1 %).
        prefix_caching: keep the content of full blocks for later requests.
        swap_space_bytes: host memory that swapped sequences may take, as bytes of one device; 0 = none.
        prefix_eviction: in which order cached blocks are lost. "lru": by last need, each group on its own.
            "aligned": also, among equals, the longest prefix first, so that all groups lose the same tokens (Jenga).
            "predicted": also, blocks of prefixes that recent requests shared are protected from new requests, see
            `PredictedPrefixes`.
        max_step_tokens: most tokens a sequence computes in one step. It bounds what a windowed group needs at
            admission; without it a whole prompt is taken to be computed at once.

    Raises:
        ValueError: when the watermark is outside [0, 1), or swap_space_bytes outside [0, bytes of the pool].
    """

    def __init__(
        self,
        layout: PoolLayout,
        *,
        watermark: float = 0.01,
        prefix_caching: bool = False,
        max_step_tokens: int | None = None,
        swap_space_bytes: int = 0,
        prefix_eviction: PrefixEviction = "aligned",
    ) -> None:
        if not 0 <= swap_space_bytes <= layout.pool_bytes:
            raise ValueError(f"swap_space_bytes={swap_space_bytes:,} is outside [0, {layout.pool_bytes:,}], the pool")
        if prefix_eviction not in get_args(PrefixEviction):
            raise ValueError(f"prefix_eviction={prefix_eviction!r} is not one of {', '.join(get_args(PrefixEviction))}")
        self.layout = layout
        self.prefix_caching = prefix_caching
        self._groups = [(group.spec.policy, group.spec.block_size) for group in layout.groups]
        self._cache = PrefixCache(self._groups)
        self._allocator = BlockAllocator(
            [group.blocks_per_page for group in layout.groups], layout.num_pages, self._cache.forget
        )
        self._admission = Admission(layout, self._allocator, watermark, max_step_tokens)
        self._predicted = None
        if prefix_caching and prefix_eviction == "predicted":
            self._predicted = PredictedPrefixes(layout, self._allocator)
        aligned = prefix_eviction != "lru"
        self._ownership = Ownership(self._allocator, self._cache, aligned=aligned, predicted=self._predicted)
        self._sequences = Sequences()
        self._pinned: set[int] = set()
        self.swap_space = SwapSpace(
            layout,
            self._allocator,
            self._ownership,
            self._sequences,
            limit_bytes=swap_space_bytes,
            watermark_pages=self._admission.watermark_pages,
        )
        self._requests: dict[int, Request] = {}

    # Admission.

    def can_admit(
        self,
        num_tokens: int,
        num_seqs: int = 1,
        *,
        cached_tokens: int = 0,
        shared_tokens: int | None = None,
        encoder_tokens: int = 0,
        prompt_tokens: int | None = None,
    ) -> Fit:
        """Whether a new request's prompt of `num_tokens` fits, in large pages over all groups.

        Args:
            num_tokens: prompt length (or any longer length that must be possible).
            num_seqs: sequences of that length; each but one has blocks of its own behind the shared full ones, at
                least a copied tail block a group.
            cached_tokens: tokens that `match_prefix` already attached.
            shared_tokens: tokens that all of them share; None = all `num_tokens`.
            encoder_tokens, prompt_tokens: see `add`.

        Returns:
            NEVER when it could not fit an empty pool above the watermark; OK when it fits now; else LATER.
        """
        self._check_encoder(encoder_tokens)
        shared = num_tokens if shared_tokens is None else min(shared_tokens, num_tokens)
        return self._admission.verdict(
            num_tokens,
            num_seqs,
            cached_tokens,
            shared,
            encoder_tokens,
            prompt_tokens,
            may_wait=self._somebody_runs,
        )

    # The life of a sequence.

    def add(self, seq_id: int, request_id: int, *, encoder_tokens: int = 0, prompt_tokens: int | None = None) -> None:
        """A sequence with empty tables; its blocks are placed beside those of its request.

        Args:
            encoder_tokens: of the request's images or audio, which cross-attention layers keep KV of; the same for
                all its sequences.
            prompt_tokens: length of the request's prompt; layers with a `PromptBudget` drop tokens only where it is
                given.

        Raises:
            ValueError: when the sequence exists, or the encoder tokens are not those of its request or nobody's.
        """
        self._new_id(seq_id)
        self._check_encoder(encoder_tokens)
        request = self._requests.get(request_id)
        if request is None:
            placed = self._allocator.associate()
            request = Request(request_id, placed, self._groups, encoder_tokens, prompt_tokens)
            self._requests[request_id] = request
        elif request.encoder_tokens != encoder_tokens:
            raise ValueError(f"encoder_tokens={encoder_tokens}: the request has {request.encoder_tokens}")
        request.num_seqs += 1
        self._sequences[seq_id] = BlockTables(request, self._cache.chains(), self._ownership.next_version())

    def match_prefix(
        self, seq_id: int, token_ids: Sequence[int], *, salt: Hashable = None, max_tokens: int | None = None
    ) -> int:
        """Attach the cached blocks of the longest prefix of `token_ids` that is valid for every group.

        Args:
            seq_id: a sequence with empty tables.
            token_ids: all tokens to be computed; the sequence keeps to them.
            salt: anything with a stable repr that keeps tenants, adapters or images apart. It also marks what
                this sequence will put into the cache: give it even where no hit is wanted (``max_tokens=0``).
            max_tokens: upper bound on the hit.

        Returns:
            Cached tokens: a multiple of every block size and at most ``len(token_ids) - 1``, so that the last
            token is computed and yields logits; 0 without prefix caching.

        Raises:
            RuntimeError: when the sequence already has blocks.
        """
        sequence = self._sequences[seq_id]
        if any(sequence.tables):
            raise RuntimeError(f"sequence {seq_id} has blocks already: match its prefix before allocating")
        if not self.prefix_caching:
            return 0
        limit = len(token_ids) - 1 if max_tokens is None else min(len(token_ids) - 1, max_tokens)
        sequence.chains = self._cache.chains(salt)
        length, tables = self._cache.match(sequence, token_ids, max(limit, 0))
        if self._predicted is not None:
            self._predicted.arrived(sequence)
        if length:
            self._ownership.attach(sequence, tables, length)
        return length

    def allocate(self, seq_id: int, num_tokens: int, *, first_write: int) -> list[BlockCopy] | None:
        """Append: slots for positions [0, `num_tokens`), of which [`first_write`, `num_tokens`) get written.

        A shared block that would be written is replaced by one of the sequence's own; if it holds earlier
        tokens the device must copy it first: at most one block a group, the partial tail (all blocks of a
        `TokenBudget`). The last owner writes in place.

        Returns:
            The copies to make before the step, or None when memory is short: then nothing has changed.

        Raises:
            ValueError: when positions before `first_write` have no slot, or one to be written was released.
        """
        sequence = self._sequences[seq_id]
        needs, replaced = self._ownership.missing_blocks(sequence, num_tokens, first_write)
        if any(needs):
            taken = self._allocator.take(needs, sequence.request.association)
            if taken is None:
                return None
            copies = self._ownership.install(sequence, taken, replaced, first_write)
        else:
            copies = []
        sequence.num_slots = max(sequence.num_slots, num_tokens)
        if self.prefix_caching and first_write < num_tokens:
            self._cache.overwrite(sequence, first_write, num_tokens)
        return copies

    def commit(self, seq_id: int, token_ids: Sequence[int], num_computed: int) -> None:
        """The first `num_computed` tokens have KV once the step now scheduled has run.

        Newly full blocks become known to the prefix cache, blocks that left every window are released. Do not
        commit tokens of a step that is still being planned: what is released here may be handed to another
        sequence at once, and that step would both read and overwrite it.

        Args:
            token_ids: all tokens the host knows; may end before `num_computed` while one is in flight, then
                only blocks known to the end are cached.
        """
        sequence = self._sequences[seq_id]
        sequence.num_computed = num_computed
        if self.prefix_caching:
            self._ownership.cache_full(sequence, token_ids, min(num_computed, len(token_ids)))
        self._ownership.release_inactive(sequence, num_computed)

    def fork(self, parent_id: int, child_id: int) -> None:
        """A new sequence of the same request that shares every block of its parent.

        The child of a swapped sequence is swapped too.

        Raises:
            ValueError: when the child exists.
        """
        self._new_id(child_id)
        swapped = self.swap_space.sequences.get(parent_id)
        child = (swapped or self._sequences[parent_id]).fork(self._ownership.next_version())
        child.request.num_seqs += 1
        if swapped is not None:
            self.swap_space.fork(child_id, child)
            return
        self._ownership.share_all(child)
        self._sequences[child_id] = child

    def free(self, seq_id: int) -> None:
        """The sequence gives up its blocks, tails before heads; those in the prefix cache stay, evictable.

        A swapped sequence gives up its host blocks.
        """
        if self.swap_space.holds(seq_id):
            sequence = self.swap_space.free(seq_id)
        else:
            sequence = self._sequences[seq_id]
            self._ownership.release_all(sequence)
            del self._sequences[seq_id]
        if seq_id in self._pinned:
            self._pinned.remove(seq_id)
            self._count_pinned()
        request = sequence.request
        request.num_seqs -= 1
        if request.num_seqs == 0:
            del self._requests[request.request_id]

    def pin(self, seq_id: int) -> None:
        """Until the sequence is freed, admission does not count on its blocks' pages ever to be had."""
        self._pinned.add(seq_id)
        self._count_pinned()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; refused (False) while any block is in use."""
        if any(group.num_used for group in self._allocator.groups):
            return False
        self._allocator.drop_evictable()
        return True

    # Steps of the above.

    @property
    def _somebody_runs(self) -> bool:
        return len(self._sequences) > len(self._pinned)

    def _count_pinned(self) -> None:
        pages = set()
        for seq_id in self._pinned:
            for group, table in zip(self.layout.groups, self._sequences[seq_id].tables, strict=True):
                pages |= {block // group.blocks_per_page for block in table if block != NO_BLOCK}
        self._admission.pinned_pages = len(pages)

    def _new_id(self, seq_id: int) -> None:
        if seq_id in self._sequences or self.swap_space.holds(seq_id):
            raise ValueError(f"sequence {seq_id} exists already")

    def _check_encoder(self, encoder_tokens: int) -> None:
        if encoder_tokens and all(policy.names_tokens for policy, _ in self._groups):
            raise ValueError(f"encoder_tokens={encoder_tokens}: no layer group has cross-attention")
