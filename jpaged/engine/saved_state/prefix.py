"""The KV of one prefix as plain data and arrays, to be saved by one process and loaded by others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jpaged.engine.engine import Engine
from jpaged.engine.saved_state.capture import pool_array
from jpaged.execution.transfer.pool_blocks import BlockCopies
from jpaged.memory import NO_BLOCK

KIND = "prefix"
"""Entry "kind" in the description of a saved prefix; a saved state has none."""
NOT_OF_BLOCKS = frozenset({"replicas", "prefix_eviction"})
"""Facts of a pool that decide nothing about a block's bytes."""


@dataclass(frozen=True)
class CapturedPrefix:
    """A copy of a prefix's blocks; the engine may go on.

    Attributes:
        host: plain data: "tokens", "cache_salt", and "blocks", the numbers of the logical blocks of each group.
        copies: content of these blocks, on its way to the host.
    """

    host: dict[str, Any]
    copies: BlockCopies

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the content of each group's blocks, by name; call it only once."""
        (groups, *_) = self.copies.arrays()
        return {pool_array(0, g): array for g, array in enumerate(groups) if array.size}


def capture_prefix(engine: Engine, seq_id: int) -> CapturedPrefix:
    """Read back all steps in flight and copy the blocks of a pinned prefix of the first replica.

    Raises:
        ValueError: the prefix is not pinned any more.
    """
    engine.settle("save_prefix()")
    sequences = engine.memory.parts.sequences
    if seq_id not in engine.prefixes.requests or seq_id not in sequences:
        raise ValueError(f"prefix {seq_id} was lost or unpinned while it was saved: save it again")
    request, tables = engine.prefixes.requests[seq_id], sequences[seq_id].tables
    if request.asks:
        raise ValueError("save_prefix() takes prompts of text: images and adapters belong to one engine")
    places = [[i for i, block in enumerate(table) if block != NO_BLOCK] for table in tables]
    blocks = [[table[i] for i in mine] for table, mine in zip(tables, places, strict=True)]
    worker, others = engine.runner.worker, [[[] for _ in tables] for _ in engine.replicas[1:]]  # type: ignore[var-annotated]
    host = {
        "tokens": request.prompt_token_ids[: request.kept_tokens],
        "cache_salt": request.cache_salt,
        "blocks": places,
    }
    return CapturedPrefix(host, worker.blocks.read(worker.pool, [blocks, *others]))


def load_prefix(
    engine: Engine, seq_id: int, host: Mapping[str, Any], arrays: Callable[[str], np.ndarray], cache_salt: str | None
) -> int:
    """Put a prefix's blocks into every replica's pool, cached and evictable, and return how many tokens there are.

    Args:
        seq_id: a new sequence id, which is free again afterwards.

    Raises:
        ValueError: prefix caching is off, or a pool is short of blocks; then no pool has changed.
        RuntimeError: see `Engine.settle`.
    """
    engine.settle("load_prefix()")
    tokens = host["tokens"]
    contents = [arrays(pool_array(0, g)) if mine else None for g, mine in enumerate(host["blocks"])]
    sizes = [plan.block_bytes for plan in engine.runner.spec.layout.groups]
    blocks: list[list[list[int]]] = []
    filled: list[list[np.ndarray]] = []
    with engine.change(refusal=ValueError):
        for replica in engine.replicas:
            taken = replica.memory.adopt(seq_id, tokens, host["blocks"], salt=cache_salt)
            if taken is None:
                for other in engine.replicas[: len(blocks)]:
                    other.memory.drop_adopted(seq_id)
                raise ValueError(
                    f"the pool has too few free or cached blocks for the prefix of {len(tokens)} tokens: load it when "
                    "fewer requests run, or raise kv_cache_memory_bytes or memory_utilization"
                )
            blocks.append([[block for _, block in mine] for mine in taken])
            filled.append(
                [
                    np.zeros((engine.runner.spec.shards, 0, size), np.uint8)
                    if content is None
                    else content[:, [row for row, _ in mine]]
                    for mine, content, size in zip(taken, contents, sizes, strict=True)
                ]
            )
        worker = engine.runner.worker
        if any(some for groups in blocks for some in groups):
            worker.pool = worker.blocks.write(worker.pool, blocks, filled)
        for replica in engine.replicas:
            replica.memory.free(seq_id)
    return len(tokens)
