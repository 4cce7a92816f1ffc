"""How much a pool holds: the longest sequence, and how many tokens of such sequences."""

from __future__ import annotations

from jpaged.memory import Lifetime, MemoryManager


def longest_sequence(memory: MemoryManager, max_model_len: int) -> int:
    """Return the tokens, prompt and output, of the longest sequence that the empty pool takes; at most `max_model_len`.

    The sequence is one whose prompt is all but its last token, which needs the most.
    """
    low, high = 0, max_model_len  # what fits, and the most that could
    while low < high:
        middle = (low + high + 1) // 2
        if memory.is_possible(Lifetime(middle, prompt_tokens=max(middle - 1, 1))):
            low = middle
        else:
            high = middle - 1
    return low


def pool_tokens(memory: MemoryManager, length: int) -> int:
    """Return how many tokens the pool holds of sequences of `length` tokens which share nothing."""
    layout, pages = memory.layout, 0.0
    for group in layout.groups:
        policy = group.spec.policy.for_request(0, max(length - 1, 1)).for_prefix(0, 0)
        blocks = policy.peak_blocks(length, min(length, memory.max_step_tokens or length), group.spec.block_size)
        pages += blocks / group.blocks_per_page
    return int(layout.num_pages / pages * length) if pages else 0
