"""Counts the sequences that a pool holds at once."""

from __future__ import annotations

from jpaged.memory.layout import PoolLayout


def sequences_at_once(layout: PoolLayout, context: int, step_tokens: int, pool_bytes: int, watermark: float) -> int:
    """Return how many sequences of `context` tokens run together.

    One of them computes its prompt; each other one keeps what its next token reads. Prompts that would be computed
    together wait for each other.

    Args:
        context: prompt and output of each sequence.
        step_tokens: most tokens of a step.
        pool_bytes: bytes of the pool; may be others than the layout's.
        watermark: share of the pool that new requests leave free.
    """
    prompt = other = 0
    for group in layout.groups:
        policy, size = group.spec.policy.for_prefix(0, 0), group.spec.block_size
        prompt += policy.peak_blocks(context, step_tokens, size) * group.block_bytes
        other += sum(map(len, policy.active_blocks(context, size))) * group.block_bytes
    usable = int(pool_bytes * (1 - watermark))
    return 0 if usable < prompt else 1 + (usable - prompt) // max(1, other)
