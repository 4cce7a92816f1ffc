"""Turns a scheduled step into the arrays of one device call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jpaged.execution.caches.adapters import AdapterBatch
from jpaged.execution.caches.base import HostStep
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.compile.buckets import Bucket
from jpaged.execution.mesh import HostOrDevice
from jpaged.execution.next_batch import DecodeBatches
from jpaged.execution.packing import Packed, opened
from jpaged.execution.token_rows import token_rows
from jpaged.memory import NoTable
from jpaged.scheduling.admission import common_prefix
from jpaged.scheduling.request import Sequence
from jpaged.scheduling.step import ScheduledStep


class StepBatch(NamedTuple):
    """Holds one ragged batch, padded to a bucket.

    Attributes:
        tokens: ids the host knows; elsewhere `source_rows` says which row of the last step's samples to take.
        query_starts: sequence s owns tokens ``[query_starts[s], query_starts[s + 1])``.
        kv_lens: tokens in the cache once this step's are written.
        caches: what else each layer group needs, see `LayerCache.batch`; in the order of `PoolSpec.caches`.
        sample_at: token row whose hidden state each sampled row starts from; as wide as the engine's batch, so
            that what comes after the step does not depend on its bucket.
        reads_all: whether the hidden states of other rows than `sample_at` are read, one bool; None = they may be.
    """

    tokens: Int[HostOrDevice, " tokens"]
    source_rows: Int[HostOrDevice, " tokens"]
    positions: Int[HostOrDevice, " tokens"]
    query_starts: Int[HostOrDevice, " seqs+1"]
    kv_lens: Int[HostOrDevice, " seqs"]
    caches: tuple[Any, ...]
    sample_at: Int[HostOrDevice, " max_seqs"]
    reads_all: Bool[HostOrDevice, " 1"] | None = None


BY_TOKEN = ("tokens", "source_rows", "positions")
"""Arrays of a `StepBatch` with an entry for each token; those of layer groups are `LayerCache.by_token`."""


def single_tokens(
    by_token: Mapping[str, Any], count: Any, caches: tuple[Any, ...], sample_at: Any, *, xp: Any = np
) -> StepBatch:
    """Return a batch whose tokens are each a separate sequence.

    Args:
        by_token: the arrays of `BY_TOKEN`.
        count: how many of the tokens are no padding, the first ones.
        xp: what the arrays are computed by, NumPy or ``jax.numpy``.
    """
    size = by_token["positions"].shape[0]
    live = xp.arange(size, dtype=xp.int32) < count
    return StepBatch(
        **by_token,
        query_starts=xp.minimum(xp.arange(size + 1, dtype=xp.int32), count).astype(xp.int32),
        kv_lens=xp.where(live, by_token["positions"] + 1, 0).astype(xp.int32),
        caches=caches,
        sample_at=sample_at,
    )


class BatchBuilder:
    """Keeps every running sequence's block tables in rows, so that a step only gathers.

    Args:
        max_num_seqs: rows, of which a sequence has one: `Sequence.row`.
        max_model_len: tokens; bounds the pages of a table.
    """

    def __init__(self, spec: PoolSpec, *, max_num_seqs: int, max_model_len: int) -> None:
        self._caches = [
            (cache, group_slice, spec.layout.groups[group_slice])
            for cache, group_slice in zip(spec.caches, spec.slices, strict=True)
        ]
        self._num_blocks = [group.num_blocks for group in spec.layout.groups]
        widths = [
            cache.table_width(layout.spec, max_model_len) for cache, _, layouts in self._caches for layout in layouts
        ]
        self._tables = [np.full((max_num_seqs, width), -1, np.int32) for width in widths]
        self._sent: list[list[list[int]]] = [[[] for _ in range(max_num_seqs)] for _ in widths]
        self._memos = [cache.memo() for cache in spec.caches]
        self._kinds = [
            layout.spec.policy.kind for layout in spec.layout.groups if isinstance(layout.spec.policy, NoTable)
        ]
        self._max_num_seqs = max_num_seqs
        self._decodes = DecodeBatches(self._caches)

    def build(self, step: ScheduledStep, bucket: Bucket) -> StepBatch:
        """Return the arrays of a step, padded to `bucket`; see `laid_out`."""
        batch: StepBatch = opened(self.laid_out(step, bucket))
        return batch

    def laid_out(self, step: ScheduledStep, bucket: Bucket) -> StepBatch | Packed:
        """Return the arrays of a step, padded to `bucket`; those of decodes that follow others are packed already.

        Raises:
            RuntimeError: a block id or row is out of the pool's range (JAX would clamp it silently), or there are more
                different adapters than places.
        """
        for place, tables_of in step.decodes.tables.items():
            self._refresh(step.decodes.seqs[place], tables_of)
        for chunk in step.others:
            if chunk.tables is not None:
                self._refresh(chunk.seq, chunk.tables)
        following = self._decodes.next(step, bucket, self._tables)
        if following is not None:
            return following
        num_seqs = step.num_chunks
        rows = token_rows(step, bucket)
        num_tokens = len(rows.seq_of_token)
        tables = []
        for table in self._tables:
            padded = np.empty((bucket.seqs, table.shape[1]), np.int32)
            padded[:num_seqs], padded[num_seqs:] = table[rows.own_rows], -1
            tables.append(padded)
        read = {kind: step.rows.get(kind, ()) for kind in self._kinds if bucket.holds(kind)}
        host = HostStep(
            step,
            rows.starts,
            rows.lengths,
            rows.seq_of_token,
            rows.positions[:num_tokens],
            bucket.tokens,
            bucket.seqs,
            read,
        )
        batch = StepBatch(
            tokens=rows.tokens,
            source_rows=rows.source_rows,
            positions=rows.positions,
            query_starts=rows.query_starts,
            kv_lens=rows.kv_lens,
            caches=tuple(
                cache.batch(host._replace(memo=memo), tables[group_slice], layouts)
                for (cache, group_slice, layouts), memo in zip(self._caches, self._memos, strict=True)
            ),
            sample_at=self._sample_at(step, rows.query_starts[1 : num_seqs + 1]),
            reads_all=None if bucket.decode_only else np.array([bool(step.scored or step.pooled)]),
        )
        return self._decodes.keep(step, bucket, batch)

    def blocks_of(self, step: ScheduledStep) -> list[list[int]]:
        """Return, for each group of the pool, the blocks that a step reads or writes, once its batch is built."""
        rows = [chunk.seq.row for chunk in step.chunks]
        found = [set(table[rows].reshape(-1).tolist()) - {-1} for table in self._tables]
        for cache, group_slice, _ in self._caches:
            found[group_slice.start].update(cache.untabled_blocks(step))
        return [sorted(blocks) for blocks in found]

    def _refresh(self, seq: Sequence, tables: list[list[int]]) -> None:
        """Write what changed of a sequence's tables: mostly a block more, at the end of thousands."""
        place = seq.row
        for group, blocks in enumerate(tables):
            sent = self._sent[group][place]
            first = common_prefix(blocks, sent)
            new = blocks[first:]
            if new and (min(new) < -1 or max(new) >= self._num_blocks[group]):
                raise RuntimeError(
                    f"sequence {seq.seq_id}: block ids {min(new)}..{max(new)} of group {group} "
                    f"are outside [0, {self._num_blocks[group]})"
                )
            row = self._tables[group][place]
            row[first : len(blocks)] = new
            if len(sent) > len(blocks):
                row[len(blocks) : len(sent)] = -1
            sent[first:] = new

    def _sample_at(self, step: ScheduledStep, ends: Int[np.ndarray, " seqs"]) -> np.ndarray:
        sample_at = np.zeros(self._max_num_seqs, np.int32)
        sampled, number = [chunk for _, _, chunk in step.other_samples], step.num_samples
        if sampled == step.others[: len(sampled)]:  # a draw after each chunk, as in a step of decodes
            sample_at[:number] = ends[:number] - 1
            return sample_at
        sampled = [chunk for _, _, chunk in step.samples]
        before = {c.seq.seq_id: int(end) - c.start - c.length for c, end in zip(step.chunks, ends, strict=True)}
        sample_at[: len(sampled)] = [before[c.seq.seq_id] + c.start + c.length - 1 for c in sampled]
        return sample_at


def empty_batch(bucket: Bucket, spec: PoolSpec, *, max_num_seqs: int, max_model_len: int) -> StepBatch:
    """Return a batch of padding only: it reads and writes no block."""
    builder = BatchBuilder(spec, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    return builder.build(ScheduledStep(), bucket)


def without_adapters(batch: StepBatch) -> StepBatch:
    """Return a step's arrays for a model that knows no adapters, as one that drafts."""
    arrays = (AdapterBatch() if isinstance(own, AdapterBatch) else own for own in batch.caches)
    return batch._replace(caches=tuple(arrays))
