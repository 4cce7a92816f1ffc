"""From a scheduled step to the arrays of one device call."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jpaged.execution.arrays import HostOrDevice
from jpaged.execution.buckets import Bucket
from jpaged.execution.sampler import SamplingArrays
from jpaged.memory.layout import PoolLayout
from jpaged.scheduling.step import Chunk, ScheduledStep

EDITS_PER_SEQ = 4
NO_TOKEN = np.int32(2**31 - 1)


class StepBatch(NamedTuple):
    """One ragged batch, padded to a bucket. Groups come in the pool layout's order.

    Attributes:
        tokens: ids the host knows; elsewhere `source_rows` says which row of the last step's samples to take.
        query_starts: sequence s owns tokens ``[query_starts[s], query_starts[s + 1])``.
        kv_lens: tokens in the cache once this step's are written.
        tables: per group, logical block -> physical block; -1 where there is none.
        slots: per group, where each token's KV goes; padding tokens lie out of range and are dropped.
        sample_at: token row whose hidden state each sampled row starts from.
    """

    tokens: Int[HostOrDevice, " tokens"]
    source_rows: Int[HostOrDevice, " tokens"]
    positions: Int[HostOrDevice, " tokens"]
    query_starts: Int[HostOrDevice, " seqs+1"]
    kv_lens: Int[HostOrDevice, " seqs"]
    tables: tuple[Int[HostOrDevice, "seqs pages"], ...]
    slots: tuple[Int[HostOrDevice, " tokens"], ...]
    sample_at: Int[HostOrDevice, " seqs"]
    sampling: SamplingArrays


class BatchBuilder:
    """Keeps every running sequence's block tables in rows, so that a step only gathers.

    Args:
        max_num_seqs: rows; a sequence's row is its `slot`.
        max_model_len: tokens; bounds the pages of a table.
        vocab_size: stands for "all" in top_k.
    """

    def __init__(self, layout: PoolLayout, *, max_num_seqs: int, max_model_len: int, vocab_size: int) -> None:
        self._sizes = [group.spec.block_size for group in layout.groups]
        self._num_blocks = [group.num_blocks for group in layout.groups]
        self._tables = [np.full((max_num_seqs, -(-max_model_len // size)), -1, np.int32) for size in self._sizes]
        self._vocab_size = vocab_size

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

        rows = np.repeat(slots, lengths)
        tables, write_slots = [], []
        for group, table in enumerate(self._tables):
            padded = np.full((bucket.seqs, table.shape[1]), -1, np.int32)
            padded[:num_seqs] = table[slots]
            tables.append(padded)
            write_slots.append(self._write_slots(group, rows, positions[:num_tokens], bucket.tokens))

        return StepBatch(
            tokens=tokens,
            source_rows=source_rows,
            positions=positions,
            query_starts=query_starts,
            kv_lens=kv_lens,
            tables=tuple(tables),
            slots=tuple(write_slots),
            sample_at=self._sample_at(step, query_starts, bucket.seqs),
            sampling=self._sampling(step, bucket.seqs),
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

    def _write_slots(self, group: int, rows: np.ndarray, positions: np.ndarray, width: int) -> np.ndarray:
        size, num_blocks = self._sizes[group], self._num_blocks[group]
        blocks = self._tables[group][rows, positions // size]
        if blocks.size and blocks.min() < 0:
            raise RuntimeError(f"a token of group {group} has no block to be written to")
        slots = np.full(width, num_blocks * size, np.int32)
        slots[: len(rows)] = blocks * size + positions % size
        return slots

    def _sample_at(self, step: ScheduledStep, query_starts: np.ndarray, width: int) -> np.ndarray:
        last_row = {id(chunk): int(query_starts[i + 1]) - 1 for i, chunk in enumerate(step.chunks)}
        sample_at = np.zeros(width, np.int32)
        for row, sample in enumerate(step.samples):
            sample_at[row] = last_row[id(sample.chunk)]
        return sample_at

    def _sampling(self, step: ScheduledStep, width: int) -> SamplingArrays:
        arrays = greedy_rows(width, self._vocab_size)
        edits: list[tuple[int, int]] = []
        for row, (request, seq, chunk) in enumerate(step.samples):
            params = request.params
            if params.temperature > 0:
                arrays.temperature[row] = params.temperature
                arrays.top_p[row] = params.top_p
                arrays.min_p[row] = params.min_p
                if params.top_k > 0:
                    arrays.top_k[row] = min(params.top_k, self._vocab_size)
                arrays.seed[row] = request.seed >> 32, request.seed & 0xFFFFFFFF
            position = chunk.start + chunk.length
            arrays.position[row] = position
            if position - seq.num_prompt < params.min_tokens:
                edits += [(row, token) for token in request.stop_ids]
        if edits:
            pairs = np.full((2, max(len(arrays.edit_row), _next_power(len(edits)))), NO_TOKEN, np.int32)
            pairs[:, : len(edits)] = np.array(edits, np.int32).T
            arrays = arrays._replace(edit_row=pairs[0], edit_token=pairs[1])
        return arrays


def greedy_rows(width: int, vocab_size: int) -> SamplingArrays:
    """Sampling settings of `width` rows that take the most likely token."""
    edits = width * EDITS_PER_SEQ
    return SamplingArrays(
        temperature=np.zeros(width, np.float32),
        top_k=np.full(width, vocab_size, np.int32),
        top_p=np.ones(width, np.float32),
        min_p=np.zeros(width, np.float32),
        seed=np.zeros((width, 2), np.uint32),
        position=np.zeros(width, np.int32),
        edit_row=np.full(edits, NO_TOKEN, np.int32),
        edit_token=np.full(edits, NO_TOKEN, np.int32),
    )


def _next_power(n: int) -> int:
    return 1 << (n - 1).bit_length()
