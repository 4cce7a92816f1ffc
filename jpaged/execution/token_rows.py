"""Lays out the tokens of a step's chunks as rows of a batch, padded to a bucket."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jpaged.execution.compile.buckets import Bucket
from jpaged.scheduling.request import Sequence
from jpaged.scheduling.step import ScheduledStep


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


def token_rows(step: ScheduledStep, bucket: Bucket) -> TokenRows:
    """Return the rows of a step's chunks."""
    # Column by column, as a step has hundreds of chunks.
    decodes, number = step.decodes, step.decodes.number
    seqs, starts, sources = decodes.seqs, decodes.starts, decodes.sources
    lengths, drafts = (), ()
    if step.others:
        own, firsts, lengths, rows, _, drafts = zip(*step.others, strict=True)
        seqs = [*seqs, *own]
        starts = np.concatenate([starts, np.array(firsts, np.int32)])
        sources = np.concatenate([sources, np.array(rows, np.int32)])
    own_rows = np.array([seq.row for seq in seqs], np.int32)
    if seqs and sum(lengths) == len(lengths) and not any(drafts):  # the only token may be a draft
        return _single(seqs, own_rows, starts, sources, bucket)
    num_tokens = np.ones(len(seqs), np.int32)
    num_tokens[number:] = lengths
    return _ragged(seqs, [()] * number + [*drafts], own_rows, starts, num_tokens, sources, bucket)


def _single(
    seqs: Seq[Sequence],
    own_rows: Int[np.ndarray, " chunks"],
    starts: Int[np.ndarray, " chunks"],
    sources: Int[np.ndarray, " chunks"],
    bucket: Bucket,
) -> TokenRows:
    """Return the rows of chunks of one token each, as of a step of decodes: `_ragged` in a third of the time."""
    number = len(seqs)
    ones, places, query_starts, tokens = _of_ones(number, bucket.tokens, bucket.seqs)
    positions, kv_lens = np.zeros(bucket.tokens, np.int32), np.zeros(bucket.seqs, np.int32)
    positions[:number] = starts
    np.add(starts, 1, out=kv_lens[:number])
    source_rows = np.full(bucket.tokens, -1, np.int32)
    source_rows[:number] = sources
    if sources.min() < 0:
        tokens = tokens.copy()
        for row in np.flatnonzero(sources < 0).tolist():
            tokens[row] = seqs[row].token_ids[starts[row]]
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
    seqs: Seq[Sequence],
    drafts: Seq[tuple[int, ...]],
    own_rows: Int[np.ndarray, " chunks"],
    starts: Int[np.ndarray, " chunks"],
    lengths: Int[np.ndarray, " chunks"],
    sources: Int[np.ndarray, " chunks"],
    bucket: Bucket,
) -> TokenRows:
    number = len(seqs)
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
    ends, num_drafts = query_starts[1 : number + 1], np.array([*map(len, drafts)], np.int32)
    known = lengths - num_drafts
    tokens, source_rows = _tokens(seqs, starts, ends - num_drafts, known, sources, bucket.tokens)
    for index in np.flatnonzero(num_drafts).tolist():
        tokens[ends[index] - num_drafts[index] : ends[index]] = drafts[index]
    return TokenRows(own_rows, starts, lengths, seq_of_token, query_starts, kv_lens, positions, tokens, source_rows)


def _tokens(
    seqs: Seq[Sequence],
    starts: Int[np.ndarray, " seqs"],
    ends: Int[np.ndarray, " seqs"],
    known: Int[np.ndarray, " seqs"],
    sources: Int[np.ndarray, " seqs"],
    width: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a batch but the drafts, and where in the last step's samples those are that the host has not
    seen.

    Args:
        ends: row of the batch after the last token of each chunk that is no draft.
        known: how many tokens of each chunk are no drafts.
        sources: their `Chunk.source_row`.
    """
    tokens = np.zeros(width, np.int32)
    source_rows = np.full(width, -1, np.int32)
    pending = sources >= 0
    source_rows[ends[pending] - 1] = sources[pending]
    # Of a decode whose token is still on the device the host has none.
    for index in np.flatnonzero(known > pending).tolist():
        start = int(starts[index])
        length = int(known[index]) - bool(pending[index])
        first = int(ends[index] - known[index])
        tokens[first : first + length] = seqs[index].token_ids[start : start + length]
    return tokens, source_rows
