"""Low-rank adapters in the pool (S-LoRA, 2023, section 5.1: unified paging); see `jpaged.memory.adapters`."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.memory.policies.no_table import NoTable


@dataclass(frozen=True)
class Adapters(NoTable):
    """The matrices of low-rank adapters: an adapter's blocks are shared by all requests that run with it.

    They belong to no sequence. Admission is told of an adapter's blocks beside what a request's sequences take.
    """

    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        return 0
