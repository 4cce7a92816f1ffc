"""The pools of `test_random_lives.py`: all kinds of layers, and the smallest pool that holds the longest sequence."""

from __future__ import annotations

from itertools import count

from fuzz_images import EMBEDDINGS, IMAGE_KV, MOST_FEATURES

from jpaged.memory import (
    ChunkedLocalAttention,
    CrossAttention,
    Fit,
    FullAttention,
    GroupSpec,
    MemoryManager,
    Need,
    PoolLayout,
    PromptBudget,
    SlidingWindow,
    StateCheckpoints,
    TokenBudget,
)
from jpaged.memory.policies import VerifiedStates

FULL = GroupSpec("full", layer_bytes=2, num_layers=3, block_size=3, policy=FullAttention())
WINDOW = GroupSpec("window", layer_bytes=1, num_layers=5, block_size=3, policy=SlidingWindow(7))
CHUNKED = GroupSpec("chunked", layer_bytes=1, num_layers=4, block_size=2, policy=ChunkedLocalAttention(5))
STATE = GroupSpec("state", layer_bytes=7, num_layers=2, block_size=3, policy=StateCheckpoints(12))
SPREAD = GroupSpec("spread states", layer_bytes=7, num_layers=2, block_size=3, policy=StateCheckpoints(6, spacing=12))
IMAGES = GroupSpec("images", layer_bytes=1, num_layers=3, block_size=2, policy=CrossAttention())
TOP = GroupSpec("token budget", layer_bytes=2, num_layers=2, block_size=3, policy=TokenBudget(1, 3, 4))
PYRAMID = GroupSpec("prompt budget", layer_bytes=2, num_layers=2, block_size=3, policy=PromptBudget(6))
DRAFT = GroupSpec("draft", layer_bytes=1, num_layers=2, block_size=3, policy=FullAttention())
RING = GroupSpec("verified states", layer_bytes=7, num_layers=2, block_size=3, policy=VerifiedStates(3))

POOLS = {
    # Budgets serve no prefix, or none beyond themselves, so other kinds are drawn without them as well.
    "recurrent": (STATE,),
    "long prompts": (FULL, SPREAD),
    "hybrid": (FULL, WINDOW, STATE, DRAFT, RING),
    "vision": (FULL, WINDOW, CHUNKED, STATE, IMAGES),
    "embeddings": (FULL, WINDOW, EMBEDDINGS, DRAFT),
    "image KV": (FULL, WINDOW, STATE, IMAGE_KV),
    "all kinds": (FULL, WINDOW, CHUNKED, STATE, IMAGES, TOP, PYRAMID, DRAFT, RING, EMBEDDINGS),
}
IMAGE_TOKENS = {None: 3, "tenant": 6}
MOST_SEQS, MOST_TOKENS, STEP_TOKENS = 8, 60, 20
DOCUMENT = [position // 3 % 3 for position in range(MOST_TOKENS)]


def smallest_layout(groups: tuple[GroupSpec, ...], more_pages: int) -> PoolLayout:
    """Return a pool that holds the longest sequence, and some large pages more."""
    page = PoolLayout.plan(groups, 1 << 20).page_bytes
    for pages in count(1):
        layout = PoolLayout.plan(groups, page * pages)
        manager = MemoryManager(layout, watermark=0.0, prefix_caching=True, max_step_tokens=STEP_TOKENS)
        encoder = _most_encoded(groups)
        if manager.can_admit(Need(MOST_TOKENS, prompt_tokens=MOST_TOKENS, encoder_tokens=encoder)) is not Fit.NEVER:
            return PoolLayout.plan(groups, page * (pages + more_pages))
    raise AssertionError("unreachable: some number of pages is enough")


def _most_encoded(groups: tuple[GroupSpec, ...]) -> int:
    """Return the most tokens that an encoder makes for a request."""
    sees = EMBEDDINGS in groups or IMAGE_KV in groups
    return max(max(IMAGE_TOKENS.values()) if IMAGES in groups else 0, MOST_FEATURES if sees else 0)
