"""From a scheduled step to the arrays of one device call."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jpaged.execution.arrays import HostOrDevice
from jpaged.execution.buckets import Bucket
from jpaged.execution.kept_batch import KeptBatch, kept_batch, prompt_budgets
from jpaged.memory.layout import PoolLayout
from jpaged.scheduling.step import Chunk, ScheduledStep


class StepBatch(NamedTuple):
    """One ragged batch, padded to a bucket. Groups come in the pool layout's order.

    Attributes:
        tokens: ids the host knows; elsewhere `source_rows` says which row of the last step's samples to take.
        query_starts: sequence s owns tokens ``[query_starts[s], query_starts[s + 1])``.
        kv_lens: tokens in the cache once this step's are written.
        tables: per group, logical block -> physical block; -1 where there is none.
        slots: per group, where each token's KV goes; padding tokens lie out of range and are dropped.
        sample_at: token row whose hidden state each sampled row starts from; as wide as the engine's batch, so
            that what comes after the step does not depend on its bucket.
        kept: where layers keep only part of a prompt; None = they keep all.
    """

    tokens: Int[HostOrDevice, " tokens"]
    source_rows: Int[HostOrDevice, " tokens"]
    positions: Int[HostOrDevice, " tokens"]
    query_starts: Int[HostOrDevice, " seqs+1"]
    kv_lens: Int[HostOrDevice, " seqs"]
    tables: tuple[Int[HostOrDevice, "seqs pages"], ...]
    slots: tuple[Int[HostOrDevice, " tokens"], ...]
    sample_at: Int[HostOrDevice, " max_seqs"]
    kept: KeptBatch | None = None


class BatchBuilder:
    """Keeps every running sequence's block tables in rows, so that a step only gathers.

    Args:
        max_num_seqs: rows; a sequence's row is its `slot`.
        max_model_len: tokens; bounds the pages of a table.
    """

    def __init__(self, layout: PoolLayout, *, max_num_seqs: int, max_model_len: int) -> None:
        self._sizes = [group.spec.block_size for group in layout.groups]
        self._num_blocks = [group.num_blocks for group in layout.groups]
        self._tables = [np.full((max_num_seqs, -(-max_model_len // size)), -1, np.int32) for size in self._sizes]
        self._max_num_seqs = max_num_seqs
        self._budgets = prompt_budgets(layout)

    def build(self, step: ScheduledStep, bucket: Bucket) -> StepBatch:
        """Arrays of a step, padded to `bucket`.

        Raises:
            RuntimeError: a block id or slot is out of the pool's range (JAX would clamp it silently).
        """
        for chunk in step.chunks:
            if chunk.tables is not None:
                self._refresh(chunk)
        chunks, num_seqs = step.chunks, len(step.chunks)
        slots = np.fromiter((c.seq.slot for c in chunks), np.int32, num_seqs)
        starts = np.fromiter((c.start for c in chunks), np.int32, num_seqs)
        lengths = np.fromiter((c.length for c in chunks), np.int32, num_seqs)
        query_starts = np.zeros(bucket.seqs + 1, np.int32)
        np.cumsum(lengths, out=query_starts[1 : num_seqs + 1])
        num_tokens = query_starts[num_seqs]
        query_starts[num_seqs + 1 :] = num_tokens

        kv_lens = np.zeros(bucket.seqs, np.int32)
        kv_lens[:num_seqs] = starts + lengths
        positions = np.zeros(bucket.tokens, np.int32)
        offsets = np.arange(num_tokens, dtype=np.int32) - np.repeat(query_starts[:num_seqs], lengths)
        positions[:num_tokens] = np.repeat(starts, lengths) + offsets
        tokens, source_rows = self._tokens(chunks, query_starts, bucket.tokens)

        kept = kept_batch(chunks, self._budgets, bucket.seqs) if self._budgets else None
        rows = np.repeat(slots, lengths)
        tables, write_slots = [], []
        for group, table in enumerate(self._tables):
            padded = np.full((bucket.seqs, table.shape[1]), -1, np.int32)
            padded[:num_seqs] = table[slots]
            tables.append(padded)
            places = positions[:num_tokens]
            if kept is not None:
                places = places - np.repeat(kept.dropped[group, :num_seqs], lengths)
            write_slots.append(self._write_slots(group, rows, places, bucket.tokens))

        return StepBatch(
            tokens=tokens,
            source_rows=source_rows,
            positions=positions,
            query_starts=query_starts,
            kv_lens=kv_lens,
            tables=tuple(tables),
            slots=tuple(write_slots),
            sample_at=self._sample_at(step, query_starts),
            kept=kept,
        )

    def _refresh(self, chunk: Chunk) -> None:
        assert chunk.tables is not None
        for group, blocks in enumerate(chunk.tables):
            row = np.asarray(blocks, np.int32)
            if row.size and (row.min() < -1 or row.max() >= self._num_blocks[group]):
                raise RuntimeError(
                    f"sequence {chunk.seq.seq_id}: block ids {row.min()}..{row.max()} of group {group} "
                    f"are outside [0, {self._num_blocks[group]})"
                )
            self._tables[group][chunk.seq.slot, : row.size] = row
            self._tables[group][chunk.seq.slot, row.size :] = -1

    def _tokens(self, chunks: list[Chunk], query_starts: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.zeros(width, np.int32)
        source_rows = np.full(width, -1, np.int32)
        for index, (seq, start, length, source_row, _) in enumerate(chunks):
            at = query_starts[index]
            if source_row >= 0:
                source_rows[at + length - 1] = source_row
                length -= 1
            if length == 1:
                tokens[at] = seq.token_ids[start]
            elif length:
                tokens[at : at + length] = seq.token_ids[start : start + length]
        return tokens, source_rows

    def _write_slots(self, group: int, rows: np.ndarray, places: np.ndarray, width: int) -> np.ndarray:
        size, num_blocks = self._sizes[group], self._num_blocks[group]
        blocks = self._tables[group][rows, places // size]
        if blocks.size and blocks.min() < 0:
            raise RuntimeError(f"a token of group {group} has no block to be written to")
        slots = np.full(width, num_blocks * size, np.int32)
        slots[: len(rows)] = blocks * size + places % size
        return slots

    def _sample_at(self, step: ScheduledStep, query_starts: np.ndarray) -> np.ndarray:
        last_row = {id(chunk): int(query_starts[i + 1]) - 1 for i, chunk in enumerate(step.chunks)}
        sample_at = np.zeros(self._max_num_seqs, np.int32)
        for row, sample in enumerate(step.samples):
            sample_at[row] = last_row[id(sample.chunk)]
        return sample_at


def empty_batch(bucket: Bucket, layout: PoolLayout, *, max_num_seqs: int, max_model_len: int) -> StepBatch:
    """A batch of padding only: it reads and writes no block."""

    def full(value: int, *shape: int) -> np.ndarray:
        return np.full(shape, value, np.int32)

    sizes, budgets = [(group.spec.block_size, group.num_blocks) for group in layout.groups], prompt_budgets(layout)
    return StepBatch(
        tokens=full(0, bucket.tokens),
        source_rows=full(-1, bucket.tokens),
        positions=full(0, bucket.tokens),
        query_starts=full(0, bucket.seqs + 1),
        kv_lens=full(0, bucket.seqs),
        tables=tuple(full(-1, bucket.seqs, -(-max_model_len // size)) for size, _ in sizes),
        slots=tuple(full(size * blocks, bucket.tokens) for size, blocks in sizes),
        sample_at=full(0, max_num_seqs),
        kept=KeptBatch(full(0, len(budgets), bucket.seqs), full(-1, bucket.seqs)) if budgets else None,
    )
