"""Recurrent layers: a state of fixed size stands for all tokens so far."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.memory.policies.attention import LocalAttention


@dataclass(frozen=True)
class MambaState(LocalAttention):
    """One state a sequence, and snapshots of it at multiples of the group's block size (Jenga, section 5.3).

    Block ``i`` holds the state after the last computed token of ``[i * block_size, (i + 1) * block_size)``. The
    step that computes a block's first token reads the state of the block before and writes its own; so a full
    block is a snapshot that is never written again, and a prefix can end wherever a snapshot is cached. A
    running sequence needs its newest state only. The block size is the distance of snapshots in tokens: the
    longest sequence there can be, where no prefix is to be cached.
    """

    reach = 1

    def first_read(self, position: int) -> int:
        return max(0, position - 1)

    def filled_tokens(self, block: int, length: int, block_size: int) -> int:
        return block_size if length > block * block_size else 0
