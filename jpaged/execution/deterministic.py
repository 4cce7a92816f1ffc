"""Runs deterministic steps: one program of one shape computes every token, whatever it is batched with.

A product's bits depend on the shapes it is computed with, and attention's on how the keys are cut. Here a step runs
as launches of `ROWS` tokens, each token a decode of its own: the rows of a launch are independent of each other, and
the keys of a token are always cut at the same positions. So a token's hidden state depends on its sequence only, not
on chunks, neighbours, preemption or prefix hits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jpaged.execution.batch import StepBatch
from jpaged.execution.buckets import Bucket
from jpaged.execution.caches.base import LayerCache

ROWS = 64
"""Tokens of a launch."""

BUCKET = Bucket(ROWS, ROWS, decode_only=True)


def padded_bucket(num_tokens: int, max_num_seqs: int) -> Bucket:
    """Return the bucket of a whole step that `launches` can cut."""
    return Bucket(-(-num_tokens // ROWS) * ROWS, max_num_seqs, decode_only=False)


def empty_launch(batch: StepBatch, caches: Sequence[LayerCache]) -> StepBatch:
    """Return a launch of padding only.

    Args:
        batch: a batch of padding only, of `BUCKET`.

    Raises:
        ValueError: layers cannot be computed token by token; the message names their group.
    """
    rows, seqs = slice(0, ROWS), np.zeros(ROWS, np.int32)
    arrays = (cache.one_by_one(own, rows, seqs) for cache, own in zip(caches, batch.caches, strict=True))
    return batch._replace(caches=tuple(arrays))


def launches(
    batch: StepBatch, num_samples: int, caches: Sequence[LayerCache]
) -> Iterator[tuple[StepBatch, np.ndarray]]:
    """Cut a step into launches, in order: a later one reads the KV that an earlier one wrote.

    Args:
        caches: those of the layer groups, in the batch's order.

    Yields:
        A batch of `BUCKET`, and which of the step's samples start from one of its tokens, ``[max_num_seqs]`` bools.
    """
    num_tokens = int(batch.query_starts[-1])
    seq = np.repeat(np.arange(len(batch.kv_lens)), np.diff(batch.query_starts))
    seq = np.pad(seq, (0, len(batch.tokens) - num_tokens))
    kv_lens = np.where(np.arange(len(seq)) < num_tokens, batch.positions + 1, 0).astype(np.int32)
    sampled = np.arange(len(batch.sample_at)) < num_samples
    for start in range(0, num_tokens, ROWS):
        rows = slice(start, start + ROWS)
        at = batch.sample_at - start
        here = sampled & (at >= 0) & (at < ROWS)
        yield (
            StepBatch(
                tokens=batch.tokens[rows],
                source_rows=batch.source_rows[rows],
                positions=batch.positions[rows],
                query_starts=np.minimum(np.arange(ROWS + 1), num_tokens - start).astype(np.int32),
                kv_lens=kv_lens[rows],
                caches=tuple(
                    cache.one_by_one(arrays, rows, seq[rows])
                    for cache, arrays in zip(caches, batch.caches, strict=True)
                ),
                sample_at=np.where(here, at, 0).astype(np.int32),
            ),
            here,
        )
