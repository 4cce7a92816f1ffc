"""Ways to hold the KV of layers that differ: the largest page for all, a static split, the GCD page, a naive Jenga."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jpaged.benchmarks.memory_shapes import Layers, ModelShape
from jpaged.benchmarks.memory_split import SplitMemory
from jpaged.benchmarks.serving_sim.policies import PAGED
from jpaged.benchmarks.serving_sim.policy import BUDGET, Policy
from jpaged.memory import BlockCopy, Fit, FullAttention, GroupSpec, MemoryManager, PoolLayout
from jpaged.memory.pages import Association

LARGEST, SPLIT, GCD, NAIVE = "largest page", "static split", "GCD page", "naive Jenga"
HYBRID_SYSTEMS = (PAGED, LARGEST, SPLIT, GCD, NAIVE)
"""The policies of the Jenga paper's comparisons; "largest page" is what it calls vLLM."""

WATERMARK = 0.01
MAX_NUM_SEQS = 256


class NaiveJenga(MemoryManager):
    """Gives any request the empty blocks of any large page: Jenga's two levels without its request-aware placement."""

    def clear(self) -> None:
        super().clear()
        allocator = self._allocator
        request_aware = allocator._take_one

        def take_any(g: int, request: Association) -> int:
            request.packed = bool(allocator.groups[g].open_pages)
            return request_aware(g, request)

        setattr(allocator, "_take_one", take_any)  # noqa: B010


class GcdMemory(SplitMemory):
    """Cuts the pool into pages of the greatest common divisor of the groups' blocks, each of which takes several.

    No page is ever in the way of another group's, so only the sum of the bytes counts. What this costs, kernels that
    gather each block from many small pages, is no matter of memory and not counted here.
    """

    def __init__(self, groups: Sequence[GroupSpec], pool_bytes: int, *, max_step_tokens: int) -> None:
        super().__init__(groups, [pool_bytes] * len(groups), max_step_tokens=max_step_tokens)
        self.page_bytes = math.gcd(*(spec.real_bytes for spec in groups))
        self._num_pages = pool_bytes // self.page_bytes
        self._step_tokens = max_step_tokens

    @property
    def used_pages(self) -> int:
        """Return how many pages are taken."""
        used = sum(
            part.reserved_blocks[0] * spec.real_bytes for part, spec in zip(self.parts, self._groups, strict=True)
        )
        return used // self.page_bytes

    def _pages(self, blocks: Sequence[int]) -> int:
        return sum(n * spec.real_bytes for n, spec in zip(blocks, self._groups, strict=True)) // self.page_bytes

    def can_admit(self, num_tokens: int, num_seqs: int = 1, **demand: Any) -> Fit:
        """Tell whether the demand fits, in pages over all groups."""
        encoder = demand.get("encoder_tokens", 0)
        blocks = []
        for g, spec in enumerate(self._groups):
            policy = spec.policy.for_request(self._encoder(g, encoder)).for_prefix(0, 0)
            step = min(self._step_tokens, num_tokens)
            blocks.append(num_seqs * policy.peak_blocks(num_tokens, step, spec.block_size))
        most = int((1 - WATERMARK) * self._num_pages)
        if self._pages(blocks) > most:
            return Fit.NEVER
        reserved = demand.get("reserved") or [0] * len(blocks)
        taken = self.used_pages + self._pages(blocks) + self._pages(reserved)
        return Fit.OK if taken <= most else Fit.LATER

    def allocate(self, seq_id: int, num_tokens: int, *, first_write: int) -> list[BlockCopy] | None:
        needs = self.outstanding(seq_id, num_tokens)
        if self.used_pages + self._pages(needs) > self._num_pages:
            return None
        return super().allocate(seq_id, num_tokens, first_write=first_write)


def largest_page_groups(shape: ModelShape) -> list[GroupSpec]:
    """Return the groups if there is one size of page, that of the largest group.

    A recurrent group's block is the states of all its layers. So an attention group's page, which is as large, has many
    hundred tokens (1,344 in the paper's Jamba), and a short request leaves most of one empty.
    """
    alike = shape.largest_page_groups()
    states = [kind for kind in shape.layers if kind.recurrent]
    if not states:
        return alike

    def bytes_of(kind: Layers) -> int:
        return kind.number * kind.token_bytes

    attention, largest = alike[0], max(map(bytes_of, states))
    token_bytes = sum(bytes_of(kind) for kind in shape.layers if not kind.recurrent)
    size = -(-largest // token_bytes)
    page = size * token_bytes // attention.num_layers
    return [GroupSpec("all", page, attention.num_layers, size, FullAttention()), *alike[1:]]


def build_hybrid(name: str, shape: ModelShape, mean_length: int, *, budget: int = BUDGET, **options: Any) -> Policy:
    """Build one of `HYBRID_SYSTEMS`.

    Args:
        mean_length: tokens of a mean request, by which a static split divides the pool.
        options: options of the memory managers.

    Raises:
        ValueError: unknown name, or options that the GCD page does not have.
    """
    pool = int(shape.pool_gib * 2**30)
    groups, shift, images = shape.groups(), 0, shape.image_tokens
    memory: Any
    if name in (PAGED, NAIVE):
        kind = MemoryManager if name == PAGED else NaiveJenga
        memory = kind(PoolLayout.plan(groups, pool), max_step_tokens=budget, **options)
    elif name == LARGEST:
        alike = largest_page_groups(shape)
        shift, images = shape.encoder_tokens, 0
        memory = MemoryManager(PoolLayout.plan(alike, pool), max_step_tokens=budget, **options)
    elif name == SPLIT:
        needs = [
            spec.real_bytes
            * spec.policy.for_request(images).for_prefix(0, 0).peak_blocks(mean_length, 1, spec.block_size)
            for spec in groups
        ]
        shares = [pool * need // sum(needs) for need in needs]
        memory = SplitMemory(groups, shares, max_step_tokens=budget, **options)
    elif name == GCD:
        if options:
            raise ValueError(f"{', '.join(options)}: the GCD page has no such option")
        memory = GcdMemory(groups, pool, max_step_tokens=budget)
    else:
        raise ValueError(f"name={name!r} is not one of {', '.join(HYBRID_SYSTEMS)}")
    return Policy(name, memory, max_num_seqs=MAX_NUM_SEQS, budget=budget, image_tokens=images, shift=shift)


def held_bytes(policy: Policy) -> int:
    """Return how many bytes of the pool nobody but their holders can have."""
    memory = policy.memory
    if isinstance(memory, GcdMemory):
        return memory.used_pages * memory.page_bytes
    parts = memory.parts if isinstance(memory, SplitMemory) else [memory]
    return sum(
        group.block_bytes * blocks
        for part in parts
        for group, blocks in zip(part.layout.groups, part.reserved_blocks, strict=True)
    )
