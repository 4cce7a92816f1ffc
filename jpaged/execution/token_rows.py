"""Lays out the tokens of a step's chunks as rows of a batch, padded to a bucket."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jpaged.execution.compile.buckets import Bucket
from jpaged.scheduling.step import Chunk


class TokenRows(NamedTuple):
    """Says which token is in which row, and where its sequence is.

    Arrays may be shared by batches, so they are not to be written.

    Attributes:
        own_rows: the row of each chunk's sequence in the engine's persistent arrays.
        starts, lengths: the chunks' starts and lengths, in tokens.
        seq_of_token: which chunk each token belongs to.
        query_starts, kv_lens, positions, tokens, source_rows: see `jpaged.execution.batch.StepBatch`.
    """

    own_rows: Int[np.ndarray, " chunks"]
    starts: Int[np.ndarray, " chunks"]
    lengths: Int[np.ndarray, " chunks"]
    seq_of_token: Int[np.ndarray, " known_tokens"]
    query_starts: Int[np.ndarray, " seqs+1"]
    kv_lens: Int[np.ndarray, " seqs"]
    positions: Int[np.ndarray, " tokens"]
    tokens: Int[np.ndarray, " tokens"]
    source_rows: Int[np.ndarray, " tokens"]


def token_rows(chunks: list[Chunk], bucket: Bucket) -> TokenRows:
    """Return the rows of a step's chunks."""
    # Column by column, as a step has hundreds of chunks.
    seqs, starts, lengths, sources, _, drafts = zip(*chunks, strict=True) if chunks else [()] * len(Chunk._fields)
    rows = [seq.row for seq in seqs]
    own_rows, firsts, source_rows = (np.array(column, np.int32) for column in (rows, starts, sources))
    if chunks and sum(lengths) == len(chunks) and not any(drafts):  # the only token may be a draft
        return _single(chunks, own_rows, firsts, source_rows, bucket)
    num_drafts = np.array([*map(len, drafts)], np.int32)
    return _ragged(chunks, own_rows, firsts, np.array(lengths, np.int32), source_rows, num_drafts, bucket)


def _single(
    chunks: list[Chunk],
    own_rows: Int[np.ndarray, " chunks"],
    starts: Int[np.ndarray, " chunks"],
    sources: Int[np.ndarray, " chunks"],
    bucket: Bucket,
) -> TokenRows:
    """Return the rows of chunks of one token each, as of a step of decodes: `_ragged` in a third of the time."""
    number = len(chunks)
    ones, places, query_starts, tokens = _of_ones(number, bucket.tokens, bucket.seqs)
    positions, kv_lens = np.zeros(bucket.tokens, np.int32), np.zeros(bucket.seqs, np.int32)
    positions[:number] = starts
    np.add(starts, 1, out=kv_lens[:number])
    source_rows = np.full(bucket.tokens, -1, np.int32)
    source_rows[:number] = sources
    if sources.min() < 0:
        tokens = tokens.copy()
        for row in np.flatnonzero(sources < 0).tolist():
            seq, start, *_ = chunks[row]
            tokens[row] = seq.token_ids[start]
    return TokenRows(own_rows, starts, ones, places, query_starts, kv_lens, positions, tokens, source_rows)


@lru_cache(maxsize=256)
def _of_ones(number: int, tokens: int, seqs: int) -> tuple[np.ndarray, ...]:
    """Return what all batches of so many chunks of one token share: the lengths, the chunk of each token, where the
    chunks start, and tokens of which the host knows none."""
    query_starts = np.minimum(np.arange(seqs + 1, dtype=np.int32), number)
    shared = np.ones(number, np.int32), np.arange(number), query_starts.astype(np.int32), np.zeros(tokens, np.int32)
    for array in shared:
        array.flags.writeable = False
    return shared


def _ragged(
    chunks: list[Chunk],
    own_rows: Int[np.ndarray, " chunks"],
    starts: Int[np.ndarray, " chunks"],
    lengths: Int[np.ndarray, " chunks"],
    sources: Int[np.ndarray, " chunks"],
    num_drafts: Int[np.ndarray, " chunks"],
    bucket: Bucket,
) -> TokenRows:
    number = len(chunks)
    query_starts = np.zeros(bucket.seqs + 1, np.int32)
    np.cumsum(lengths, out=query_starts[1 : number + 1])
    num_tokens = int(query_starts[number])
    query_starts[number + 1 :] = num_tokens
    kv_lens = np.zeros(bucket.seqs, np.int32)
    kv_lens[:number] = starts + lengths
    positions = np.zeros(bucket.tokens, np.int32)
    seq_of_token = np.repeat(np.arange(number), lengths)
    offsets = np.arange(num_tokens, dtype=np.int32) - query_starts[seq_of_token]
    positions[:num_tokens] = starts[seq_of_token] + offsets
    ends = query_starts[1 : number + 1]
    tokens, source_rows = _tokens(chunks, ends - num_drafts, lengths - num_drafts, sources, num_drafts, bucket.tokens)
    return TokenRows(own_rows, starts, lengths, seq_of_token, query_starts, kv_lens, positions, tokens, source_rows)


def _tokens(
    chunks: list[Chunk],
    ends: Int[np.ndarray, " seqs"],
    known: Int[np.ndarray, " seqs"],
    sources: Int[np.ndarray, " seqs"],
    num_drafts: Int[np.ndarray, " seqs"],
    width: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a batch, and where in the last step's samples those are that the host has not seen.

    Args:
        ends: row of the batch after the last token of each chunk that is no draft.
        known, num_drafts: how many tokens of each chunk are no drafts, and how many are.
        sources: their `Chunk.source_row`.
    """
    tokens = np.zeros(width, np.int32)
    source_rows = np.full(width, -1, np.int32)
    pending = sources >= 0
    source_rows[ends[pending] - 1] = sources[pending]
    # Of a decode whose token is still on the device the host has none.
    for index in np.flatnonzero(known > pending).tolist():
        seq, start, *_ = chunks[index]
        length = int(known[index]) - bool(pending[index])
        first = int(ends[index] - known[index])
        tokens[first : first + length] = seq.token_ids[start : start + length]
    for index in np.flatnonzero(num_drafts).tolist():
        tokens[ends[index] : ends[index] + num_drafts[index]] = chunks[index].drafts
    return tokens, source_rows
