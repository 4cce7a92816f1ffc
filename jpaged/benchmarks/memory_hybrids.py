"""Simulates how much of recurrent models' prefixes is found: attention in blocks of 16 tokens beside checkpoints of the
states, against blocks of attention inflated to the size of a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jpaged.benchmarks.memory_shapes import BLOCK_SIZE, FULL, ROW_BYTES, SHAPES, Layers, ModelShape
from jpaged.benchmarks.memory_simulation import Outcome, simulate
from jpaged.benchmarks.memory_traces import HASH_BLOCK, Demand, draw_articles, draw_conversations
from jpaged.memory import GroupSpec, StateCheckpoints

INSTRUCTIONS, INSTRUCTION_TOKENS = 24, 1024
ARTICLES = (8, 24)
POOL_GIB = 16.0

INTERVAL = 512
"""Tokens between two checkpoints of the states."""


def _attention(number: int, kv_heads: int, head_dim: int) -> Layers:
    return Layers("full", number, 2 * kv_heads * head_dim * 2, FULL)


def _states(number: int, numbers: int, channels: int) -> Layers:
    """Return recurrent layers whose states are so many float32 numbers and three tokens of a convolution's channels,
    in whole rows."""
    convolved = -(-3 * 2 * channels // ROW_BYTES) * ROW_BYTES
    return Layers("state", number, 4 * numbers + convolved, StateCheckpoints(INTERVAL))


HYBRIDS = (
    replace(next(shape for shape in SHAPES if shape.name == "Jamba-1.5-Mini"), pool_gib=POOL_GIB),
    ModelShape(
        "Bamba-9B", (_attention(3, 8, 128), _states(29, 128 * 64 * 128, 8192 + 2 * 128)), 262144, pool_gib=POOL_GIB
    ),
    ModelShape(
        "Qwen3-Next-80B",
        (_attention(12, 2, 256), _states(36, 32 * 128 * 128, 2 * 16 * 128 + 32 * 128)),
        262144,
        pool_gib=POOL_GIB,
    ),
)
"""Models with one kind of attention and one of recurrence."""


class Inflated(ModelShape):
    """Describes a model in pages of one size: a layer's block of attention is as large as a recurrent layer's state."""

    @property
    def block_tokens(self) -> int:
        """Return the tokens of a block of attention, a multiple of the usual block."""
        attention, states = self.layers
        return -(-states.token_bytes // (attention.token_bytes * BLOCK_SIZE)) * BLOCK_SIZE

    def groups(self, block_size: int = BLOCK_SIZE) -> list[GroupSpec]:
        """Return groups of as many layers as have attention, so that all blocks are of one size; a checkpoint of the
        states lies at the end of each block of attention."""
        attention, states = self.layers
        number, size = attention.number, self.block_tokens
        page = size * attention.token_bytes
        return [
            GroupSpec(attention.name, page, number, size, FULL),
            *(
                GroupSpec(f"{states.name} {first}", page, number, size, StateCheckpoints(size))
                for first in range(0, states.number, number)
            ),
        ]


def inflated(shape: ModelShape) -> Inflated:
    """Return the same model with attention's blocks as large as states."""
    return Inflated(**vars(shape))


@dataclass(frozen=True)
class HybridHits:
    """Says how much of the prefixes was found with one size of attention's blocks.

    Attributes:
        block_tokens: tokens of such a block.
        outcomes: by workload.
    """

    model: str
    block_tokens: int
    eviction: str
    outcomes: dict[str, Outcome]


def workloads(num_requests: int, seed: int) -> dict[str, list[Demand]]:
    """Return questions about articles, requests that begin with one of some instructions, and conversations."""
    found = {f"{number} articles": draw_articles(number, num_requests // 2, seed) for number in ARTICLES}
    found["instructions"] = draw_instructed(num_requests, seed)
    found["conversations"] = draw_conversations(num_requests, seed)
    return found


def draw_instructed(requests: int, seed: int) -> list[Demand]:
    """Draw short questions, each behind one of `INSTRUCTIONS` instructions of `INSTRUCTION_TOKENS`."""
    rng, each = np.random.default_rng(seed), INSTRUCTION_TOKENS // HASH_BLOCK
    ids = [tuple(range(each * number, each * (number + 1))) for number in range(INSTRUCTIONS)]
    chosen = rng.integers(0, INSTRUCTIONS, requests)
    asked, answered = rng.integers(16, 200, requests), rng.integers(50, 200, requests)
    return [Demand(INSTRUCTION_TOKENS + int(asked[i]), int(answered[i]), ids[chosen[i]]) for i in range(requests)]


def run(
    num_requests: int, seed: int, say: Callable[[str], None], shapes: Sequence[ModelShape] = HYBRIDS
) -> list[HybridHits]:
    """Simulate all workloads with each model, in blocks of both sizes."""
    asked = workloads(num_requests, seed)
    found = []
    for shape in shapes:
        say(f"{shape.name}, prefixes")
        large = inflated(shape)
        for blocks, size, eviction in (
            (shape, BLOCK_SIZE, "predicted"),
            (large, large.block_tokens, "predicted"),
            (large, large.block_tokens, "lru"),
        ):
            outcomes = {name: _hits(blocks, demands, eviction) for name, demands in asked.items()}
            found.append(HybridHits(shape.name, size, eviction, outcomes))
    return found


def _hits(shape: ModelShape, demands: Sequence[Demand], eviction: str) -> Outcome:
    return simulate("jpaged", shape, demands, prefix_caching=True, prefix_eviction=eviction)


def rows(found: Sequence[HybridHits]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table: what was found of what an earlier request began with too, the mean
    batch, and the steps until no request waits."""
    head = ["model", "tokens of a block", "prefix_eviction", *found[0].outcomes]
    cells = [
        [
            hits.model,
            f"{hits.block_tokens:,}",
            hits.eviction,
            *(f"{cell.reuse:.0%}; {cell.batch:.1f}; {cell.steps:,}" for cell in hits.outcomes.values()),
        ]
        for hits in found
    ]
    return head, cells
