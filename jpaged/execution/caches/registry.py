"""Lists the kinds of layers that the pool can hold."""

from __future__ import annotations

from collections.abc import Iterable

from jpaged.execution.caches.adapters import AdapterCache
from jpaged.execution.caches.attention import ChunkedAttentionCache, FullAttentionCache, SlidingWindowCache
from jpaged.execution.caches.base import BlockSettings, LayerCache
from jpaged.execution.caches.cross_attention import CrossAttentionCache
from jpaged.execution.caches.images import ImageCache
from jpaged.execution.caches.latent import LatentCache
from jpaged.execution.caches.previous_token import PreviousTokenCache
from jpaged.execution.caches.prompt_budget import PromptBudgetCache
from jpaged.execution.caches.state import StateCache
from jpaged.model_api import LayerGroup

KINDS: dict[str, type[LayerCache]] = {
    "full attention": FullAttentionCache,
    "sliding window": SlidingWindowCache,
    "chunked attention": ChunkedAttentionCache,
    "prompt budget": PromptBudgetCache,
    "state": StateCache,
    "latent attention": LatentCache,
    "image features": ImageCache,
    "cross attention": CrossAttentionCache,
    "previous token": PreviousTokenCache,
    "low-rank adapters": AdapterCache,
}
"""The kinds of layers by `LayerGroup.kind`."""


def layer_caches(groups: Iterable[LayerGroup], form: BlockSettings) -> tuple[LayerCache, ...]:
    """Return the `LayerCache` of each of a model's layer groups, for blocks of this format.

    Raises:
        ValueError: a group is of an unknown kind.
    """
    caches = []
    for group in groups:
        if group.kind not in KINDS:
            raise ValueError(f"layer group {group.name!r} is of kind {group.kind!r}; known: {', '.join(KINDS)}")
        caches.append(KINDS[group.kind](group, form))
    return tuple(caches)
