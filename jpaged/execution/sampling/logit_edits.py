"""Applies a request's changes to its logits before a token is chosen: bias, penalties, bans and masks.

The token drawn in the step before may not have reached the host when a step's arrays are made. It is read on the
device, and counted, compared and penalised as if the host had known it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jpaged.execution.mesh import HostOrDevice
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.hooks import mask_after
from jpaged.scheduling.request import Request
from jpaged.scheduling.step import Sample


class LogitEdits(NamedTuple):
    """Holds the edits of a batch's logits. Padding of `token_row` and `ban_row` is out of range.

    Attributes:
        pending: where in the last step's samples a row's newest token lies; -1 = the host knew it.
        repetition: logits of tokens seen are divided by it if they are positive, else multiplied by it; 1 = no change.
        presence: subtracted once from the logits of generated tokens.
        frequency: subtracted as often as a token was generated.
        token_row, token_id: pairs of a row and a token whose logit is changed; each pair occurs once at most.
        token_bias: what is added to the pair's logit.
        token_count: how often the row generated the token.
        token_seen: whether the row's prompt or output has it.
        ban_row, ban_id: pairs of a row and a token that the row cannot draw.
        ban_after: the pending token after which a pair is banned; -1 = it is always banned.
        masked: whether `mask` applies to a row.
        mask: bit ``i % 32`` of word ``i // 32`` says whether token i can be drawn.
    """

    pending: Int[HostOrDevice, " seqs"]
    repetition: Float[HostOrDevice, " seqs"]
    presence: Float[HostOrDevice, " seqs"]
    frequency: Float[HostOrDevice, " seqs"]
    token_row: Int[HostOrDevice, " tokens"]
    token_id: Int[HostOrDevice, " tokens"]
    token_bias: Float[HostOrDevice, " tokens"]
    token_count: Float[HostOrDevice, " tokens"]
    token_seen: Bool[HostOrDevice, " tokens"]
    ban_row: Int[HostOrDevice, " bans"]
    ban_id: Int[HostOrDevice, " bans"]
    ban_after: Int[HostOrDevice, " bans"]
    masked: Bool[HostOrDevice, " seqs"]
    mask: Int[HostOrDevice, "seqs words"]


def edit_logits(
    logits: Float[Array, "seqs vocab"], edits: LogitEdits, last_tokens: Int[Array, " max_seqs"]
) -> Float[Array, "seqs vocab"]:
    """Return the edited logits: bias first, then repetition, frequency and presence penalties, then bans and masks."""
    newest = jnp.where(edits.pending >= 0, last_tokens[jnp.maximum(edits.pending, 0)], -1)
    logits = _reweigh(logits, edits, newest)
    applies = (edits.ban_after < 0) | (edits.ban_after == _of_row(newest, edits.ban_row))
    row = jnp.where(applies, edits.ban_row, logits.shape[0])
    logits = logits.at[row, edits.ban_id].set(-jnp.inf, mode="drop")
    return lax.cond(jnp.any(edits.masked), lambda: _mask(logits, edits), lambda: logits)


def _reweigh(
    logits: Float[Array, "seqs vocab"], edits: LogitEdits, newest: Int[Array, " seqs"]
) -> Float[Array, "seqs vocab"]:
    """Reweigh every pair of the host, and one more a row for its pending token. Where both are the same token, both
    write the same value."""
    seqs = logits.shape[0]
    again = edits.token_id == _of_row(newest, edits.token_row)

    def of_newest(values: HostOrDevice) -> Float[Array, " seqs"]:
        return jnp.zeros(seqs).at[edits.token_row].add(jnp.where(again, values, 0.0), mode="drop")

    penalised = (edits.repetition != 1) | (edits.presence != 0) | (edits.frequency != 0)
    newest_row = jnp.where(penalised & (newest >= 0), jnp.arange(seqs), seqs)
    row = jnp.concatenate([edits.token_row, newest_row])
    token = jnp.concatenate([edits.token_id, newest])
    bias = jnp.concatenate([edits.token_bias, of_newest(edits.token_bias)])
    count = jnp.concatenate([edits.token_count + again, of_newest(edits.token_count) + 1])
    seen = jnp.concatenate([edits.token_seen | again, jnp.ones(seqs, bool)])

    entry = logits.at[row, token]
    value = entry.get(mode="fill", fill_value=0.0) + bias
    repetition = jnp.where(seen, _of_row(edits.repetition, row), 1.0)
    value = jnp.where(value > 0, value / repetition, value * repetition)
    value -= _of_row(edits.frequency, row) * count + _of_row(edits.presence, row) * (count > 0)
    return entry.set(value, mode="drop")


def _of_row(values: HostOrDevice, row: HostOrDevice) -> Array:
    return jnp.asarray(values)[jnp.minimum(row, len(values) - 1)]


def _mask(logits: Float[Array, "seqs vocab"], edits: LogitEdits) -> Float[Array, "seqs vocab"]:
    seqs, vocab = logits.shape
    bits = (jnp.asarray(edits.mask)[:, :, None] >> jnp.arange(32)) & 1
    allowed = bits.reshape(seqs, -1)[:, :vocab].astype(bool) | ~jnp.asarray(edits.masked)[:, None]
    return jnp.where(allowed, logits, -jnp.inf)


NO_ROW = np.int32(2**31 - 1)
BANS = 256
TOKENS = 1024
"""Pairs that arrays hold at least; longer ones go by factors of four, and compile a sampler more each."""
_PAIRS = ("token_row", "token_id", "token_bias", "token_count", "token_seen", "ban_row", "ban_id", "ban_after")


@cache
def no_edits(width: int, vocab_size: int) -> LogitEdits:
    """Return edits of `width` rows that change nothing; nor can their arrays be changed, as most steps share them."""
    edits = _blank(width, vocab_size)
    for array in edits:
        assert isinstance(array, np.ndarray)
        array.flags.writeable = False
    return edits


def _blank(width: int, vocab_size: int) -> LogitEdits:
    """Return edits of `width` rows to be filled in."""

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
    edits = _blank(width, vocab_size)
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
    """Return the edits of a row by bias and penalties, for the tokens that the host knows."""
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
    """Yield each (token, token that must be pending or -1) that the row cannot draw at `position`, after
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
