"""Draws docs/drawings/ by running the real memory manager on small cases: nothing in them is drawn by hand.

python scripts/docs_drawings.py docs/drawings
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from docs_svg import drawing, moment

from jpaged.memory import FullAttention, GroupSpec, MemoryManager, PoolLayout, SlidingWindow

TEXT = list(range(100, 200))
"""Tokens of the prompts; only which ones are equal matters."""


def _one_group(num_blocks: int, **options: bool) -> MemoryManager:
    """Make a pool for layers of full attention, of blocks of 4 tokens."""
    spec = GroupSpec("full", layer_bytes=1024, num_layers=1, block_size=4, policy=FullAttention())
    return MemoryManager(PoolLayout.plan([spec], 1024 * num_blocks), watermark=0.0, **options)


def _two_groups(num_pages: int, window: int = 4) -> MemoryManager:
    """Make a pool for layers of full attention and of a sliding window, of blocks of 2 tokens, of 3 and 2 KiB."""
    specs = [
        GroupSpec("full", layer_bytes=1024, num_layers=3, block_size=2, policy=FullAttention()),
        GroupSpec("window", layer_bytes=1024, num_layers=2, block_size=2, policy=SlidingWindow(window)),
    ]
    return MemoryManager(PoolLayout.plan(specs, 6 * 1024 * num_pages), watermark=0.0)


def _compute(manager: MemoryManager, seq_id: int, tokens: list[int], start: int = 0) -> list:
    """Compute `tokens` from position `start` on in one step; returns the copies that the step makes first."""
    copies = manager.allocate(seq_id, len(tokens), first_write=start)
    if copies is None:
        raise RuntimeError(f"the pool is too small for the drawing: sequence {seq_id}, {len(tokens)} tokens")
    manager.commit(seq_id, tokens, len(tokens))
    manager.dispatched()
    return copies


def blocks() -> str:
    """Draw two sequences whose blocks lie where there was room."""
    manager = _one_group(8)
    for seq_id, length in ((0, 7), (1, 5)):
        manager.add(seq_id, seq_id)
        _compute(manager, seq_id, TEXT[:length])
    moments = [moment(manager, "Two prompts, of 7 and 5 tokens, were computed", {0: 7, 1: 5})]
    for length in range(8, 14):
        _compute(manager, 0, TEXT[:length], length - 1)
        _compute(manager, 1, TEXT[: length - 2], length - 3)
    moments.append(moment(manager, "Six tokens later: a block was taken when one was full, wherever", {0: 13, 1: 11}))
    return drawing("Blocks and block tables", moments)


def copy_on_write() -> str:
    """Draw three outputs of one prompt."""
    manager = _one_group(8)
    manager.add(0, 0)
    _compute(manager, 0, TEXT[:6])
    moments = [moment(manager, "A prompt of 6 tokens", {0: 6})]
    manager.fork(0, 1)
    manager.fork(0, 2)
    moments.append(moment(manager, "Three outputs of it: forked, nothing is copied", dict.fromkeys(range(3), 6)))
    copies = [copy for seq_id in range(3) for copy in _compute(manager, seq_id, [*TEXT[:6], seq_id], 6)]
    caption = "Each writes a token: two copy the block that is not full, the last owner writes in place"
    moments.append(moment(manager, caption, dict.fromkeys(range(3), 7), copies))
    return drawing("Copy-on-write", moments)


def large_pages() -> str:
    """Draw one pool for blocks of two sizes."""
    manager = _two_groups(6)
    for seq_id, length in ((0, 5), (1, 3)):
        manager.add(seq_id, seq_id)
        _compute(manager, seq_id, TEXT[:length])
    caption = "A page of 6 KiB holds 2 blocks of the one group or 3 of the other; a request fills its own first"
    moments = [moment(manager, caption, {0: 5, 1: 3})]
    manager.free(0)
    moments.append(moment(manager, "A has finished: its pages are free, for either group", {1: 3}))
    _compute(manager, 1, TEXT[:9], 3)
    moments.append(moment(manager, "B has grown into them", {1: 9}))
    return drawing("Large pages", moments)


def layer_groups() -> str:
    """Draw what a sliding window gives back while full attention keeps all."""
    manager = _two_groups(6)
    manager.add(0, 0)
    moments, done = [], 0
    for length in (4, 8, 12):
        for end in range(done + 1, length + 1):
            _compute(manager, 0, TEXT[:end], end - 1)
        moments.append(moment(manager, f"{length} tokens; the window is 4", {0: length}))
        done = length
    return drawing("Layer groups", moments)


def prefix_cache() -> str:
    """Draw a prefix that is kept, found and lost."""
    manager = _one_group(7, prefix_caching=True)

    def serve(seq_id: int, tokens: list[int]) -> int:
        manager.add(seq_id, seq_id)
        cached = manager.match_prefix(seq_id, tokens)
        _compute(manager, seq_id, tokens, cached)
        return cached

    serve(0, TEXT[:14])
    manager.free(0)
    moments = [moment(manager, "A had 14 tokens and has finished: its full blocks stay, nobody's", {})]
    other = [*TEXT[:8], *TEXT[50:53]]
    cached = serve(1, other)
    caption = f"B begins as A did: {cached} tokens are found, {len(other) - cached} are computed"
    moments.append(moment(manager, caption, {1: len(other)}))
    third = TEXT[60:74]
    serve(2, third)
    caption = "C needs four blocks: empty ones first, then A's cached one is lost"
    moments.append(moment(manager, caption, {1: len(other), 2: len(third)}))
    return drawing("Prefix cache and eviction", moments)


DRAWINGS: dict[str, Callable[[], str]] = {
    f"{draw.__name__}.svg": draw for draw in (blocks, copy_on_write, large_pages, layer_groups, prefix_cache)
}


def write(folder: Path) -> None:
    """Write every drawing into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / name).write_text(draw())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
