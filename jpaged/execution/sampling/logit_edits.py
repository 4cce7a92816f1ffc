"""Applies bias, penalties, bans and masks: what a request changes in its logits before a token is chosen.

The token drawn in the step before may not have reached the host when a step's arrays are made. It is read on the
device, and counted, compared and penalised as if the host had known it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jpaged.execution.arrays import HostOrDevice


class LogitEdits(NamedTuple):
    """Holds the edits of a batch's logits. Padding of `token` and `ban` has rows out of range.

    Attributes:
        pending: where in the last step's samples a row's newest token lies; -1 = the host knew it.
        repetition: logits of tokens seen are divided by it where positive, else multiplied; 1 = none.
        presence: subtracted once from the logits of generated tokens.
        frequency: subtracted as often as a token was generated.
        token_row, token_id: pairs, each at most once, whose logit is changed.
        token_bias: added.
        token_count: how often the row generated the token.
        token_seen: whether the row's prompt or output has it.
        ban_row, ban_id: pairs that cannot be drawn ...
        ban_after: ... where the pending token is this one; -1 = whatever it is.
        masked: whether `mask` counts for a row.
        mask: bit ``i % 32`` of word ``i // 32``: token i can be drawn.
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
