"""Small managers for the tests of this folder."""

from __future__ import annotations

from jpaged.memory import FullAttention, GroupSpec, MemoryManager, PoolLayout, SlidingWindow


def full_manager(num_blocks: int = 20, block_size: int = 4, **options) -> MemoryManager:
    """One full-attention group, one block a large page."""
    spec = GroupSpec("full", layer_bytes=8, num_layers=1, block_size=block_size, policy=FullAttention())
    return MemoryManager(PoolLayout.plan([spec], 8 * num_blocks), **options)


def window_manager(num_pages: int = 20, window: int = 4, **options) -> MemoryManager:
    """Full attention (group 0) and a sliding window (group 1), blocks of 2 tokens, 2 and 3 blocks a large page."""
    specs = [
        GroupSpec("full", layer_bytes=3, num_layers=1, block_size=2, policy=FullAttention()),
        GroupSpec("window", layer_bytes=2, num_layers=1, block_size=2, policy=SlidingWindow(window)),
    ]
    return MemoryManager(PoolLayout.plan(specs, 6 * num_pages), **options)


def run(manager: MemoryManager, seq_id: int, tokens: list[int], start: int = 0) -> None:
    """Admit a sequence, compute `tokens` from position `start` in one step and commit them."""
    manager.admitted(seq_id)
    assert manager.allocate(seq_id, len(tokens), first_write=start) is not None
    manager.dispatched()
    manager.commit(seq_id, tokens, len(tokens))


def serve(manager: MemoryManager, seq_id: int, tokens: list[int], **match_options) -> int:
    """A new sequence from admission to its computed prompt; returns the cached tokens."""
    manager.add(seq_id, seq_id)
    cached = manager.match_prefix(seq_id, tokens, **match_options)
    run(manager, seq_id, tokens, cached)
    return cached


def counts(manager: MemoryManager) -> tuple[int, int, int]:
    """(used, evictable, free) blocks of group 0."""
    group = manager.report().groups[0]
    return group.used, group.evictable, manager.free_blocks(0)
