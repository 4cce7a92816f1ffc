"""The edits of a request's logits before a token is chosen: bias and penalties, bans, masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jpaged.execution.mesh import HostOrDevice
from jpaged.execution.sampling.edit import (
    NO_ROW,
    TURN,
    Edit,
    Table,
    as_wide,
    history_of,
    newest,
    of_row,
    pending_row,
    with_rows,
)
from jpaged.execution.sampling.token_counts import count_new, token_edits
from jpaged.scheduling.hooks import mask_after
from jpaged.scheduling.request import Request
from jpaged.scheduling.step import Sample

# ---------------------------------------------------------------- bias and penalties


class WeighedTokens(NamedTuple):
    """Holds the tokens whose logits bias and penalties change. Padding of `row` is out of range.

    Attributes:
        row, token: pairs of a row and a token whose logit is changed; each pair occurs once at most. None = the next
            three are tables, see `Edit.spread`.
        bias: what is added to the pair's logit.
        times: how often the row generated the token.
        seen: whether the row's prompt or output has it.
        pending: see `pending_row`.
        repetition: logits of tokens seen are divided by it if they are positive, else multiplied by it; 1 = no change.
        presence: subtracted once from the logits of generated tokens.
        frequency: subtracted as often as a token was generated.
    """

    row: Int[HostOrDevice, " pairs"] | None
    token: Int[HostOrDevice, " pairs"] | None
    bias: Float[HostOrDevice, " pairs"] | Float[Array, "seqs vocab"]
    times: Float[HostOrDevice, " pairs"] | Float[Array, "seqs vocab"]
    seen: Bool[HostOrDevice, " pairs"] | Bool[Array, "seqs vocab"]
    pending: Int[HostOrDevice, " seqs"]
    repetition: Float[HostOrDevice, " seqs"]
    presence: Float[HostOrDevice, " seqs"]
    frequency: Float[HostOrDevice, " seqs"]


class BiasAndPenalties(Edit[WeighedTokens]):
    """Adds a request's biases to its logits, then applies the repetition, frequency and presence penalties."""

    fields = ("logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty")
    arrays = WeighedTokens
    pairs = ("row", "token", "bias", "times", "seen")
    room_of_row = 8192
    room = 65536

    def asks(self, request: Request) -> bool:
        return request.params.penalised or bool(request.params.logit_bias)

    def blank(self, width: int, vocab_size: int) -> WeighedTokens:
        room = self.listed(width)
        return WeighedTokens(
            row=np.full(room, NO_ROW, np.int32),
            token=np.full(room, NO_ROW, np.int32),
            bias=np.zeros(room, np.float32),
            times=np.zeros(room, np.float32),
            seen=np.zeros(room, np.bool_),
            pending=np.full(width, -1, np.int32),
            repetition=np.ones(width, np.float32),
            presence=np.zeros(width, np.float32),
            frequency=np.zeros(width, np.float32),
        )

    def fill(self, rows: Sequence[int], samples: Sequence[Sample], blank: WeighedTokens) -> WeighedTokens:
        each = [samples[row] for row in rows]
        known = [history_of(sample) for sample in each]
        tokens = [
            token_edits(request.params, seq.num_prompt, history) if chunk.drafts else count_new(request, seq)
            for (request, seq, chunk), history in zip(each, known, strict=True)
        ]
        params = [sample.request.params for sample in each]
        pending = with_rows(blank.pending, rows, map(pending_row, each, known))
        repetition = with_rows(blank.repetition, rows, (of.repetition_penalty for of in params))
        presence = with_rows(blank.presence, rows, (of.presence_penalty for of in params))
        frequency = with_rows(blank.frequency, rows, (of.frequency_penalty for of in params))
        ids, bias, times, seen = (np.concatenate(parts) for parts in zip(*tokens, strict=True))
        of_rows = np.repeat(rows, [len(edit.ids) for edit in tokens])
        by_row = blank._replace(pending=pending, repetition=repetition, presence=presence, frequency=frequency)
        return self.filled(by_row, blank, row=of_rows, token=ids, bias=bias, times=times, seen=seen)

    def edit(
        self, logits: Float[Array, "seqs vocab"], arrays: WeighedTokens, last_tokens: Int[Array, " max_seqs"]
    ) -> Float[Array, "seqs vocab"]:
        """Reweigh every pair of the host, and the pending token of each row that has no pair of it."""
        seqs, last = logits.shape[0], newest(arrays.pending, last_tokens)
        if arrays.row is None:
            return self._edit_all(logits, arrays, last)
        factors = arrays.repetition, arrays.frequency, arrays.presence

        def reweigh(
            logits: Array, row: Array, token: Array, bias: Array | float, seen: Array | bool, count: Array | int
        ) -> Array:
            entry = logits.at[row, token]
            value = entry.get(mode="fill", fill_value=0.0) + bias
            return entry.set(_penalised(value, seen, count, *(of_row(each, row) for each in factors)), mode="drop")

        def turn(carry: tuple[Array, Array], some: Any) -> tuple[Array, Array]:
            logits, has_pair = carry
            again = some.token == of_row(last, some.row)
            logits = reweigh(logits, some.row, some.token, some.bias, some.seen | again, some.times + again)
            return logits, has_pair.at[some.row].max(again, mode="drop")

        logits, has_pair = self.in_turns(turn, (logits, jnp.zeros(seqs, bool)), arrays)
        penalised = (arrays.repetition != 1) | (arrays.presence != 0) | (arrays.frequency != 0)
        row = jnp.where(penalised & (last >= 0) & ~has_pair, jnp.arange(seqs), NO_ROW)
        return reweigh(logits, row, last, 0.0, True, 1)

    def _edit_all(
        self, logits: Float[Array, "seqs vocab"], arrays: WeighedTokens, last: Int[Array, " seqs"]
    ) -> Float[Array, "seqs vocab"]:
        """Reweigh every token by tables; those without a pair keep their logits."""
        newest_one = jnp.where(last >= 0, jnp.arange(logits.shape[0]), NO_ROW), last
        bias, times, seen = (as_wide(jnp.asarray(each), logits) for each in (arrays.bias, arrays.times, arrays.seen))
        count, seen = times.at[newest_one].add(1, mode="drop"), seen.at[newest_one].set(True, mode="drop")
        of_rows = (jnp.asarray(each)[:, None] for each in (arrays.repetition, arrays.frequency, arrays.presence))
        return _penalised(logits + bias, seen, count, *of_rows)


def _penalised(
    value: Array, seen: Array | bool, count: Array | int, repetition: Array, frequency: Array, presence: Array
) -> Array:
    repetition = jnp.where(seen, repetition, 1.0)
    value = jnp.where(value > 0, value / repetition, value * repetition)
    return value - (frequency * count + presence * (count > 0))


# ---------------------------------------------------------------- bans


class BannedTokens(NamedTuple):
    """Holds the tokens that rows cannot draw. Padding of `row` is out of range.

    Attributes:
        row, token: pairs of a row and a token that it cannot draw; None where `after` is a table.
        after: the pending token after which a pair is banned; -1 = it is always banned. A table says which tokens are
            banned after the pending one.
        pending: see `pending_row`.
    """

    row: Int[HostOrDevice, " pairs"] | None
    token: Int[HostOrDevice, " pairs"] | None
    after: Int[HostOrDevice, " pairs"] | Bool[Array, "seqs vocab"]
    pending: Int[HostOrDevice, " seqs"]


class Bans(Edit[BannedTokens]):
    """Bans stop tokens before min_tokens, and the last token of each bad word whose beginning was generated."""

    fields = ("bad_words", "min_tokens")
    arrays = BannedTokens
    pairs = ("row", "token", "after")
    room_of_row = TURN
    room = 8192

    def asks(self, request: Request) -> bool:
        return bool(request.bad_words or request.params.min_tokens)

    def blank(self, width: int, vocab_size: int) -> BannedTokens:
        room = self.listed(width)
        return BannedTokens(
            row=np.full(room, NO_ROW, np.int32),
            token=np.full(room, NO_ROW, np.int32),
            after=np.full(room, -1, np.int32),
            pending=np.full(width, -1, np.int32),
        )

    def fill(self, rows: Sequence[int], samples: Sequence[Sample], blank: BannedTokens) -> BannedTokens | None:
        pending, bans = np.array(blank.pending), list[tuple[int, int, int]]()
        for row in rows:
            request, seq, chunk = sample = samples[row]
            history = history_of(sample)
            pending[row] = pending_row(sample, history)
            found = _bans(request, seq.num_prompt, history, chunk.start + chunk.length)
            bans += ((row, token, after) for token, after in found)
        if not bans:
            return None
        of_rows, tokens, after = np.array(bans, np.int32).T
        return self.filled(blank._replace(pending=pending), blank, row=of_rows, token=tokens, after=after)

    def edit(
        self, logits: Float[Array, "seqs vocab"], arrays: BannedTokens, last_tokens: Int[Array, " max_seqs"]
    ) -> Float[Array, "seqs vocab"]:
        if arrays.row is None:
            return jnp.where(as_wide(jnp.asarray(arrays.after), logits), -jnp.inf, logits)

        last = newest(arrays.pending, last_tokens)

        def turn(logits: Array, some: BannedTokens) -> Array:
            return logits.at[_banned(some, last)].set(-jnp.inf, mode="drop")

        return self.in_turns(turn, logits, arrays)

    def table(self, seqs: int, vocab_size: int) -> Table:
        return {"after": jnp.zeros((seqs, vocab_size), bool)}

    def spread(self, table: Table, arrays: BannedTokens, last_tokens: Int[Array, " max_seqs"]) -> Table:
        """Ban the pairs that apply; a row may have a token several times, after different ones."""
        banned = _banned(arrays, newest(arrays.pending, last_tokens))
        return {"after": table["after"].at[banned].set(True, mode="drop")}


def _banned(arrays: BannedTokens, last: Int[Array, " seqs"]) -> tuple[Array, HostOrDevice]:
    """Return rows and tokens of the pairs that are banned after each row's pending token; rows of others are out of
    range."""
    assert arrays.row is not None and arrays.token is not None, "they are no table"
    applies = (arrays.after < 0) | (arrays.after == of_row(last, arrays.row))
    return jnp.where(applies, arrays.row, NO_ROW), arrays.token


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


# ---------------------------------------------------------------- masks


_PIECE = 8
"""Rows of masks that travel to the devices together; a row has 16 KB at 128,000 tokens."""


class TokenMasks(NamedTuple):
    """Holds the only tokens that rows can draw.

    Attributes:
        source: which row of `masks`, all pieces one after the other, applies to a row of the sampler; -1 = none.
        masks: bit ``i % 32`` of word ``i // 32`` says whether token i can be drawn. There is room for a mask of each
            row, in pieces, of which those without any lie on the devices already.
    """

    source: Int[HostOrDevice, " seqs"]
    masks: tuple[Int[HostOrDevice, "piece words"], ...]


class Masks(Edit[TokenMasks]):
    """Lets a row draw only the tokens of allowed_token_ids, or those that its rules allow: its grammar, which heeds
    those, and the closing mark where its thoughts have no tokens left."""

    fields = (
        "allowed_token_ids",
        "structured_outputs",
        "thinking_token_budget",
        "reasoning_end_str",
        "reasoning_parser",
        "tool_parser",
    )
    arrays = TokenMasks

    def asks(self, request: Request) -> bool:
        return request.allowed_mask is not None or request.has_rules

    def blank(self, width: int, vocab_size: int) -> TokenMasks:
        rows = min(width, _PIECE)
        piece = np.broadcast_to(np.int32(-1), (rows, -(-vocab_size // 32)))
        return TokenMasks(np.full(width, -1, np.int32), (piece,) * -(-width // rows))

    def fill(self, rows: Sequence[int], samples: Sequence[Sample], blank: TokenMasks) -> TokenMasks | None:
        masks = {row: mask for row in rows if (mask := _mask_of(samples[row])) is not None}
        if not masks:
            return None
        pieces, found, room = list(blank.masks), list(masks.values()), len(blank.masks[0])
        for number, first in enumerate(range(0, len(found), room)):
            own = found[first : first + room]
            pieces[number] = with_rows(pieces[number], range(len(own)), own)
        return TokenMasks(with_rows(blank.source, [*masks], range(len(masks))), tuple(pieces))

    def edit(
        self, logits: Float[Array, "seqs vocab"], arrays: TokenMasks, last_tokens: Int[Array, " max_seqs"]
    ) -> Float[Array, "seqs vocab"]:
        return lax.cond(jnp.any(arrays.source >= 0), lambda: _mask(logits, arrays), lambda: logits)


def _mask_of(sample: Sample) -> Int[np.ndarray, " words"] | None:
    """Return the mask of a row's next token; None = it has none, or no token is drawn for it after all."""
    request, seq, chunk = sample
    rules = None if seq.finished or sample.is_overtaken else seq.grammar
    mask = None if rules is None else mask_after(rules, chunk.drafts)
    return request.allowed_mask if mask is None else mask


def _mask(logits: Float[Array, "seqs vocab"], arrays: TokenMasks) -> Float[Array, "seqs vocab"]:
    seqs, vocab = logits.shape
    source = jnp.asarray(arrays.source)
    masks = jnp.concatenate(arrays.masks)[jnp.maximum(source, 0)]
    bits = (masks[:, :, None] >> jnp.arange(32)) & 1
    bits = bits.reshape(seqs, -1)[:, :vocab].astype(bool)
    if not jax.sharding.get_abstract_mesh().empty:
        # Each replica decides by itself whether it comes here, so nothing here may wait for another replica's devices.
        # Cut at other places than the words are, the bits would cross devices, by an operation that all take part in.
        bits = lax.with_sharding_constraint(bits, PartitionSpec())
    allowed = bits | (source < 0)[:, None]
    return jnp.where(allowed, logits, -jnp.inf)
