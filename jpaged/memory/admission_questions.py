"""What a scheduler asks of the memory before it lets a request in; nothing here changes a block."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from jpaged.memory.adapters import HeldAdapter
from jpaged.memory.admission import Admission, Demand, Fit
from jpaged.memory.block_tables import BlockTables, RequestBlocks
from jpaged.memory.disk import Prefix
from jpaged.memory.images import HeldImage
from jpaged.memory.policies import ImageFeatures, Policy
from jpaged.memory.relief import Relief
from jpaged.memory.spans import TokenSpan
from jpaged.memory.state import MemoryState


class AdmissionQuestions(MemoryState):
    """Answers whether requests fit, and what those that run have yet to take; `MemoryManager` makes the parts.

    Attributes:
        prefix_caching: whether the content of full blocks is kept for later requests.
    """

    prefix_caching: bool
    _admission: Admission
    _groups: list[tuple[Policy, int]]

    def can_admit(
        self,
        num_tokens: int,
        num_seqs: int = 1,
        *,
        cached_tokens: int = 0,
        shared_tokens: int | None = None,
        encoder_tokens: int = 0,
        prompt_tokens: int | None = None,
        adapter_blocks: int = 0,
        pinned_tokens: int = 0,
        seq_id: int | None = None,
        reserved: Sequence[int] | None = None,
        may_wait: bool | None = None,
        relief: Relief | None = None,
    ) -> Fit:
        """Tell whether a new request's prompt of `num_tokens` fits, in large pages over all groups.

        Args:
            num_tokens: prompt length (or any longer length that must be possible).
            num_seqs: sequences of that length; each but one has blocks of its own behind the shared full ones, at
                least a copied tail block a group.
            cached_tokens: tokens that `match_prefix` already attached or, without a `seq_id`, would at best.
            shared_tokens: tokens that all of them share; None = all `num_tokens`.
            encoder_tokens, prompt_tokens: see `add`; of images that stay, only those that have yet to take blocks.
            adapter_blocks: blocks of the request's adapter that have yet to be taken.
            pinned_tokens: leading tokens that lie in pinned blocks, see `pinned_prefix`.
            seq_id: the request's first sequence, where its prefix was matched already; None = it was not.
            reserved: blocks of each group that others have yet to take, see `outstanding`.
            may_wait: whether LATER is an answer rather than the loss of protected blocks; None = it is while there are
                sequences that are not pinned.
            relief: blocks that would be freed first, see `relief`; None = none.

        Returns:
            NEVER when it could not fit a pool with nothing but pinned blocks above the watermark; OK when it fits now;
            else LATER.
        """
        demand = self._demand(num_tokens, num_seqs, shared_tokens, encoder_tokens, prompt_tokens, adapter_blocks)
        if seq_id is not None:
            known = zip(demand.groups, self._sequences[seq_id].request.groups, strict=True)
            groups = [asked if isinstance(asked[0], ImageFeatures) else its for asked, its in known]
            demand = demand._replace(groups=groups)
        elif cached_tokens:
            demand = demand._replace(groups=[(policy.for_prefix(0, 0), size) for policy, size in demand.groups])
        if not self._admission.is_possible(demand, pinned_tokens=pinned_tokens, pinned_pages=self._pinned.num_pages):
            return Fit.NEVER
        needs = self._admission.missing(demand, cached_tokens)
        if reserved is not None:
            needs = [need + others for need, others in zip(needs, reserved, strict=True)]
        may_wait = len(self._sequences) > len(self._pinned.seq_ids) if may_wait is None else may_wait
        return Fit.OK if self._admission.has_room(needs, may_wait=may_wait, relief=relief) else Fit.LATER

    def is_tight(
        self,
        num_tokens: int,
        num_seqs: int = 1,
        *,
        shared_tokens: int | None = None,
        encoder_tokens: int = 0,
        prompt_tokens: int | None = None,
        adapter_blocks: int = 0,
    ) -> bool:
        """Tell whether a request is sure to fit the pool alone only if its blocks are packed; arguments are those of
        `can_admit`."""
        demand = self._demand(num_tokens, num_seqs, shared_tokens, encoder_tokens, prompt_tokens, adapter_blocks)
        return self._admission.is_tight(demand, pinned_pages=self._pinned.num_pages)

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

    def cached_prefix(self, token_ids: Sequence[int], *, salt: Hashable = None, spans: Sequence[TokenSpan] = ()) -> int:
        """Return how many tokens `match_prefix` would attach now; nothing is attached."""
        if not self.prefix_caching:
            return 0
        request = RequestBlocks(-1, self._allocator.associate(), self._groups, 0)
        tables = BlockTables(request, self._cache.chains(salt, spans), 0)
        return self._cache.match(tables, token_ids, max(len(token_ids) - 1, 0), spans)[0]

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
        is_next: bool = False,
    ) -> None:
        """Begin to read from disk what `match_prefix` would not find in the pool, where that is worth it.

        Args:
            now, is_next: see `DiskReading.look`.
        """
        if self.disk is None or not self.prefix_caching:
            return
        groups = [(policy.for_request(encoder_tokens, prompt_tokens), size) for policy, size in self._groups]
        prefix = Prefix(token_ids, max(len(token_ids) - 1, 0), groups, self._cache.chains(salt, spans), spans)
        self.disk.look(request_id, prefix, self._cache, now, is_next=is_next)

    def prefix_to_come(self, seq_id: int, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens of a sequence can be found as a prefix once it has computed
        them, at most."""
        if not self.prefix_caching:
            return 0
        return self._sequences[seq_id].request.prefix_to_come(num_tokens, self.layout.prefix_step)

    def outstanding(self, seq_id: int, num_tokens: int) -> list[int]:
        """Return how many blocks of each group a sequence has yet to take until `num_tokens` tokens are computed. A
        swapped one takes those beside the blocks that it needs to come back."""
        swapped = self.swap_space.sequences.get(seq_id)
        if swapped is not None:
            return self._admission.outstanding(swapped, num_tokens, is_swapped=True)
        return self._admission.outstanding(self._sequences[seq_id], num_tokens)

    def outstanding_fork(self, parent_id: int, num_tokens: int, shared_tokens: int) -> list[int]:
        """Return the same as `outstanding` for a sequence that is still to be forked from the first `shared_tokens`
        tokens of another."""
        parent = self.swap_space.sequences.get(parent_id) or self._sequences[parent_id]
        return self._admission.forked(parent, num_tokens, shared_tokens)

    def outstanding_image(self, features: int) -> list[int]:
        """Return how many blocks of each group an image of so many features takes."""
        blocks = [0] * len(self._groups)
        if self.images.group is not None:
            blocks[self.images.group] = -(-features // self.images.block_size)
        return blocks

    def adapter_needs(self, blocks: int) -> list[int] | None:
        """Return how many blocks of each group an adapter of so many blocks takes; None = no block.

        Raises:
            ValueError: no layer group keeps adapters.
        """
        if not blocks:
            return None
        if self.adapters.group is None:
            raise ValueError(f"adapter_blocks={blocks}: no layer group keeps adapters")
        return [blocks if g == self.adapters.group else 0 for g in range(len(self._groups))]

    def relief(self) -> Relief:
        """Return a count of what freeing sequences would spare, none so far: `count_relief` adds them, `can_admit`
        takes it."""
        return Relief(self._allocator)

    def count_relief(self, relief: Relief, seq_id: int) -> None:
        """Add what freeing one more sequence would spare to `relief`. O(its blocks)."""
        relief.add(self._sequences[seq_id])

    def count_adapter_relief(self, relief: Relief, held: HeldAdapter) -> None:
        """Add what giving up an adapter would spare to `relief`, where nobody else holds it. O(its blocks)."""
        assert self.adapters.group is not None
        relief.add_blocks(self.adapters.group, held.blocks)

    def count_image_relief(self, relief: Relief, held: HeldImage) -> None:
        """Add what giving up an image would spare to `relief`, where nobody else holds it. O(its blocks)."""
        if self.images.group is not None:
            relief.add_blocks(self.images.group, held.blocks[held.given :])

    def _demand(
        self,
        num_tokens: int,
        num_seqs: int,
        shared_tokens: int | None,
        encoder_tokens: int,
        prompt_tokens: int | None,
        adapter_blocks: int,
    ) -> Demand:
        self._check_encoder(encoder_tokens)
        shared = num_tokens if shared_tokens is None else min(shared_tokens, num_tokens)
        groups = [(policy.for_request(encoder_tokens, prompt_tokens), size) for policy, size in self._groups]
        return Demand(num_tokens, num_seqs, shared, groups, self.adapter_needs(adapter_blocks))

    def _check_encoder(self, encoder_tokens: int) -> None:
        if encoder_tokens and all(policy.names_tokens for policy, _ in self._groups):
            raise ValueError(f"encoder_tokens={encoder_tokens}: no layer group has cross-attention or takes images")
