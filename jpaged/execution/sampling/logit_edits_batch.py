"""Turns a step's samples into the arrays of `LogitEdits`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jpaged.execution.sampling.logit_edits import LogitEdits
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.hooks import mask_after
from jpaged.scheduling.request import Request
from jpaged.scheduling.step import Sample

NO_ROW = np.int32(2**31 - 1)
BANS = 256
TOKENS = 1024
"""Pairs that arrays hold at least; longer ones go by factors of four, and compile a sampler more each."""
_PAIRS = ("token_row", "token_id", "token_bias", "token_count", "token_seen", "ban_row", "ban_id", "ban_after")


def no_edits(width: int, vocab_size: int) -> LogitEdits:
    """Return edits of `width` rows that change nothing."""

    def full(size: int, value: Any, dtype: type) -> np.ndarray:
        return np.full(size, value, dtype)

    return LogitEdits(
        pending=full(width, -1, np.int32),
        repetition=full(width, 1, np.float32),
        presence=full(width, 0, np.float32),
        frequency=full(width, 0, np.float32),
        token_row=full(TOKENS, NO_ROW, np.int32),
        token_id=full(TOKENS, NO_ROW, np.int32),
        token_bias=full(TOKENS, 0, np.float32),
        token_count=full(TOKENS, 0, np.float32),
        token_seen=full(TOKENS, False, np.bool_),
        ban_row=full(BANS, NO_ROW, np.int32),
        ban_id=full(BANS, NO_ROW, np.int32),
        ban_after=full(BANS, -1, np.int32),
        masked=full(width, False, np.bool_),
        mask=np.broadcast_to(np.int32(-1), (width, -(-vocab_size // 32))),
    )


def logit_edits(samples: list[Sample], width: int, vocab_size: int) -> LogitEdits:
    """Return the edits of a step's samples, padded to `width` rows that change nothing."""
    edits = no_edits(width, vocab_size)
    bans: list[tuple[int, int, int]] = []
    tokens: list[tuple[int, TokenEdits]] = []
    masks: dict[int, np.ndarray] = {}
    for row, (request, seq, chunk) in enumerate(samples):
        params, position = request.params, chunk.start + chunk.length
        history = [*seq.token_ids, *chunk.drafts] if chunk.drafts else seq.token_ids
        if position > len(history):
            edits.pending[row] = chunk.source_row
        bans += ((row, token, after) for token, after in _bans(request, seq.num_prompt, history, position))
        if request.allowed_mask is not None:
            masks[row] = request.allowed_mask
        if seq.grammar is not None:
            mask = mask_after(seq.grammar, chunk.drafts)
            if mask is not None:
                masks[row] = mask
        if params.penalised or params.logit_bias:
            tokens.append((row, token_edits(params, seq.num_prompt, history)))
            edits.repetition[row] = params.repetition_penalty
            edits.presence[row] = params.presence_penalty
            edits.frequency[row] = params.frequency_penalty
    if masks:
        edits = edits._replace(mask=np.array(edits.mask))
        for row, mask in masks.items():
            edits.masked[row], edits.mask[row] = True, mask
    if bans:
        rows, ids, after = np.array(bans, np.int32).T
        edits = _padded(edits, BANS, ban_row=rows, ban_id=ids, ban_after=after)
    if tokens:
        rows = np.concatenate([np.full(len(edit.ids), row) for row, edit in tokens])
        ids, bias, times, seen = (np.concatenate(parts) for parts in zip(*(edit for _, edit in tokens), strict=True))
        edits = _padded(
            edits, TOKENS, token_row=rows, token_id=ids, token_bias=bias, token_count=times, token_seen=seen
        )
    return edits


class TokenEdits(NamedTuple):
    """Holds the tokens of one row whose logit may change, each once: bias, how often generated, whether the row has
    it."""

    ids: Int[np.ndarray, " tokens"]
    bias: Float[np.ndarray, " tokens"]
    times: Int[np.ndarray, " tokens"]
    seen: Bool[np.ndarray, " tokens"]


def token_edits(params: SamplingParams, num_prompt: int, token_ids: list[int]) -> TokenEdits:
    """Return what bias and penalties do to a row, as far as the host knows its tokens."""
    bias = params.logit_bias or {}
    start = 0 if params.repetition_penalty != 1 else num_prompt
    history = np.array(token_ids[start:] if params.penalised else [], np.int64)
    ids, place = np.unique(np.concatenate([np.array([*bias], np.int64), history]), return_inverse=True)
    of_bias, of_history = place[: len(bias)], place[len(bias) :]
    size = len(ids)
    return TokenEdits(
        ids,
        np.bincount(of_bias, weights=[*bias.values()], minlength=size),
        np.bincount(of_history[num_prompt - start :], minlength=size),
        np.bincount(of_history, minlength=size) > 0,
    )


def _bans(request: Request, num_prompt: int, token_ids: list[int], position: int) -> Iterator[tuple[int, int]]:
    """Yield each (token, token that must be pending or -1) that the row cannot draw at `position`, behind
    `token_ids`."""
    if position - num_prompt < request.params.min_tokens:
        yield from ((token, -1) for token in request.stop_ids)
    for *before, last in request.bad_words:
        start = position - len(before)
        if start < num_prompt:
            continue
        known = token_ids[start:position]
        if known == before[: len(known)]:
            yield last, before[-1] if len(known) < len(before) else -1


def pad_alike(each: list[LogitEdits]) -> list[LogitEdits]:
    """Pad all edits with rows out of range, until each has as many pairs as the largest."""
    sizes = [max(len(column) for column in columns) for columns in zip(*map(_pairs, each), strict=True)]
    nothing = no_edits(1, 1)
    return [
        edits._replace(
            **{
                name: np.pad(column, (0, size - len(column)), constant_values=getattr(nothing, name)[0])
                for name, column, size in zip(_PAIRS, _pairs(edits), sizes, strict=True)
            }
        )
        for edits in each
    ]


def _pairs(edits: LogitEdits) -> list[np.ndarray]:
    return [np.asarray(getattr(edits, name)) for name in _PAIRS]


def _padded(edits: LogitEdits, least: int, **columns: np.ndarray) -> LogitEdits:
    """Return `edits` with new columns, padded with rows out of range."""
    count = len(next(iter(columns.values())))
    size = least
    while size < count:
        size *= 4
    padded = {}
    for name, values in columns.items():
        old = getattr(edits, name)
        padded[name] = np.full(size, old[0], old.dtype)
        padded[name][:count] = values
    return edits._replace(**padded)
