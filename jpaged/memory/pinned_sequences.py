"""Prefixes that stay in the pool: blocks held by reference, as a provider's shared prefix (PagedAttention, 4.4)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from jpaged.memory.capacity import Lifetime
from jpaged.memory.hash_chain import HashChain, TokenSpan, last_end
from jpaged.memory.manager import MemoryManager


class PinnedSequences:
    """Holds whole blocks of prefixes, each as a sequence that never runs.

    Args:
        room_tokens: length of a sequence that must always fit together with the pinned blocks.

    Attributes:
        seq_ids: ids of the prefixes that are pinned, or were until `lose`.
        lost: ids among them whose prefixes hold no blocks until they are computed and pinned again.
    """

    def __init__(self, memory: MemoryManager, room_tokens: int) -> None:
        self.seq_ids: set[int] = set()
        self.lost: set[int] = set()
        self._memory = memory
        self._room_tokens = room_tokens
        self._step = memory.layout.prefix_step

    def length(self, num_tokens: int, spans: Sequence[TokenSpan] = ()) -> int:
        """Return how many of the first `num_tokens` tokens fill whole blocks of every group.

        Args:
            spans: tokens that stand for images; those of a whole image are all among them or none.

        Raises:
            ValueError: the tokens fill no such block, or there is no prefix cache.
        """
        if not self._memory.prefix_caching:
            raise ValueError("a prefix can be pinned only with enable_prefix_caching=True")
        if num_tokens < self._step:
            raise ValueError(
                f"the prompt's {num_tokens} tokens are fewer than the {self._step} of a block: only whole blocks of a "
                "prompt are pinned"
            )
        length = last_end(num_tokens, spans, self._step)
        if length < self._step:
            raise ValueError(
                f"the prompt's {num_tokens} tokens have no end of a block, each of {self._step} tokens, that is not "
                "within an image: only whole blocks and whole images of a prompt are pinned"
            )
        return length

    def pages_for(self, length: int) -> int:
        """Return how many large pages a prefix of so many tokens, of which none is cached, takes at least."""
        pages = 0
        for group in self._memory.layout.groups:
            runs = group.spec.policy.for_prefix(length, 0).active_blocks(length, group.spec.block_size)
            pages += -(-sum(map(len, runs)) // group.blocks_per_page)
        return pages

    def pin(
        self,
        seq_id: int,
        token_ids: Sequence[int],
        salt: Hashable = None,
        spans: Sequence[TokenSpan] = (),
        chains: Mapping[int, HashChain] | None = None,
    ) -> bool:
        """Hold the blocks of a prefix under a new sequence id; return False, holding nothing, when some are not cached.

        Args:
            spans: tokens that stand for images, in order.
            chains: see `MemoryManager.match_prefix`.

        Raises:
            ValueError: `length` refuses the prefix, or the rest of the pool would be too small.
        """
        memory, length = self._memory, self.length(len(token_ids), spans)
        memory.add(seq_id, -1 - seq_id)
        # One more token, as the last token of a prefix hit is always left to be computed.
        prompt = [*token_ids[:length], 0]
        if memory.match_prefix(seq_id, prompt, salt=salt, spans=spans, chains=chains) < length:
            memory.free(seq_id)
            return False
        memory.pin(seq_id)
        if not memory.is_possible(Lifetime(self._room_tokens)):
            memory.free(seq_id)
            raise ValueError(
                f"pinning the prompt's {length} tokens would leave too little of the pool of "
                f"{memory.layout.num_pages} large pages for a sequence of max_model_len={self._room_tokens} tokens: "
                "raise kv_cache_memory_bytes or memory_utilization, or lower max_model_len"
            )
        self.seq_ids.add(seq_id)
        self.lost.discard(seq_id)
        return True

    def expect(self, seq_id: int) -> None:
        """Mark a new prefix as lost: it waits to be computed and pinned."""
        self.seq_ids.add(seq_id)
        self.lost.add(seq_id)

    def lose(self) -> None:
        """Mark every prefix as lost: the memory was cleared, so the blocks are gone, and the prefixes wait to be pinned
        again."""
        self.lost = set(self.seq_ids)

    def release(self) -> None:
        """Free every prefix's blocks and mark it as lost: other weights make their content useless."""
        for seq_id in self.seq_ids - self.lost:
            self._memory.free(seq_id)
        self.lose()

    def unpin(self, seq_id: int) -> None:
        """Free the blocks of a prefix; they stay cached, evictable.

        Raises:
            ValueError: nothing is pinned under this id.
        """
        if seq_id not in self.seq_ids:
            raise ValueError(f"prefix {seq_id} is not pinned, or no longer")
        self.seq_ids.remove(seq_id)
        if seq_id in self.lost:
            self.lost.remove(seq_id)
        else:
            self._memory.free(seq_id)
