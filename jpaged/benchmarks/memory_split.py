"""Divides a pool among the layer groups once and for all."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from types import SimpleNamespace

from jpaged.memory import BlockCopy, Fit, GroupSpec, MemoryManager, PoolLayout, Relief, TokenSpan


class SplitMemory:
    """Answers what the scheduler asks of a memory manager, by one for each layer group.

    Args:
        groups: the model's layer groups.
        shares: bytes that each of them gets.
        options: options of every `MemoryManager`.
    """

    def __init__(self, groups: Sequence[GroupSpec], shares: Sequence[int], **options: object) -> None:
        self.parts = [
            MemoryManager(PoolLayout.plan([spec], share), **options)  # type: ignore[arg-type]
            for spec, share in zip(groups, shares, strict=True)
        ]
        self._groups = groups
        tail = max(part.layout.prompt_tail for part in self.parts)
        step = math.lcm(*(part.layout.prefix_step for part in self.parts))
        self.layout = SimpleNamespace(groups=(), num_pages=0, page_bytes=0, prompt_tail=tail, prefix_step=step)
        self.images = SimpleNamespace(stays=False)  # they are counted as tokens of the encoder
        self.swap_space = self.parts[0].swap_space
        self.disk = None  # what it loses is lost
        self.prefix_caching = self.parts[0].prefix_caching
        self._added: dict[int, tuple[int, int, int | None]] = {}

    def _encoder(self, g: int, encoder_tokens: int) -> int:
        return 0 if self._groups[g].policy.names_tokens else encoder_tokens

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
        relief: list[Relief] | None = None,
    ) -> Fit:
        verdicts = {
            part.can_admit(
                num_tokens,
                num_seqs,
                cached_tokens=cached_tokens,
                shared_tokens=shared_tokens,
                encoder_tokens=self._encoder(g, encoder_tokens),
                prompt_tokens=prompt_tokens,
                adapter_blocks=adapter_blocks,
                pinned_tokens=pinned_tokens,
                seq_id=seq_id,
                reserved=None if reserved is None else [reserved[g]],
                may_wait=may_wait,
                relief=None if relief is None else relief[g],
            )
            for g, part in enumerate(self.parts)
        }
        return next(fit for fit in (Fit.NEVER, Fit.LATER, Fit.OK) if fit in verdicts)

    def is_tight(self, num_tokens: int, num_seqs: int = 1, **demand: object) -> bool:
        """Return False: a part has one group, whose pages nobody else could take."""
        return False

    def pinned_prefix(self, token_ids: Sequence[int], **prompt: object) -> int:
        """Return 0: nothing is pinned."""
        return 0

    def pack(self, seq_id: int) -> None:
        for part in self.parts:
            part.pack(seq_id)

    def outstanding(self, seq_id: int, num_tokens: int) -> list[int]:
        return [part.outstanding(seq_id, num_tokens)[0] for part in self.parts]

    def outstanding_fork(self, parent_id: int, num_tokens: int, shared_tokens: int) -> list[int]:
        return [part.outstanding_fork(parent_id, num_tokens, shared_tokens)[0] for part in self.parts]

    def relief(self) -> list[Relief]:
        return [part.relief() for part in self.parts]

    def count_relief(self, relief: list[Relief], seq_id: int) -> None:
        for mine, part in zip(relief, self.parts, strict=True):
            part.count_relief(mine, seq_id)

    def add(
        self,
        seq_id: int,
        request_id: int,
        *,
        encoder_tokens: int = 0,
        prompt_tokens: int | None = None,
        kept_tokens: int = 0,
    ) -> None:
        """Add a sequence; nothing is pinned here, so `kept_tokens` is 0."""
        self._added[seq_id] = request_id, encoder_tokens, prompt_tokens
        for g, part in enumerate(self.parts):
            encoder = self._encoder(g, encoder_tokens)
            part.add(seq_id, request_id, encoder_tokens=encoder, prompt_tokens=prompt_tokens)

    def match_prefix(
        self,
        seq_id: int,
        token_ids: Sequence[int],
        *,
        salt: Hashable = None,
        spans: Sequence[TokenSpan] = (),
        max_tokens: int | None = None,
        from_disk: bool = False,
    ) -> int:
        """Return the longest prefix that every part has; they are asked again for less until they agree."""
        length = max_tokens
        while True:
            hits = [
                part.match_prefix(seq_id, token_ids, salt=salt, spans=spans, max_tokens=length) for part in self.parts
            ]
            if len(set(hits)) == 1:
                return hits[0]
            length = min(hits)
            request_id, encoder_tokens, prompt_tokens = self._added[seq_id]
            self.free(seq_id)
            self.add(seq_id, request_id, encoder_tokens=encoder_tokens, prompt_tokens=prompt_tokens)

    def cached_prefix(self, token_ids: Sequence[int], *, salt: Hashable = None, spans: Sequence[TokenSpan] = ()) -> int:
        """Return a bound on what `match_prefix` would attach: the least of the parts' own prefixes."""
        return min(part.cached_prefix(token_ids, salt=salt, spans=spans) for part in self.parts)

    def prefix_to_come(self, seq_id: int, num_tokens: int) -> int:
        return min(part.prefix_to_come(seq_id, num_tokens) for part in self.parts)

    def allocate(self, seq_id: int, num_tokens: int, *, first_write: int) -> list[BlockCopy] | None:
        made = [part.allocate(seq_id, num_tokens, first_write=first_write) for part in self.parts]
        return None if None in made else []

    def commit(self, seq_id: int, token_ids: Sequence[int], num_computed: int) -> None:
        for part in self.parts:
            part.commit(seq_id, token_ids, num_computed)

    def capacity(self, seq_id: int) -> int:
        return min(part.capacity(seq_id) for part in self.parts)

    def free(self, seq_id: int) -> None:
        del self._added[seq_id]
        for part in self.parts:
            part.free(seq_id)
