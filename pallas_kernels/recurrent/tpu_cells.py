"""Holds the arithmetic of the TPU kernels on a piece of a state: see `pallas_kernels.recurrent.tpu_ring.Cell`.

Loops over a piece's rows are unrolled: a piece is one block of instructions, whose loads, arithmetic and stores the
compiler interleaves. Vectors with one number per row of a state (B, C, keys, queries) arrive along lanes; they are
transposed into columns, [rows, 128] with the same number in all lanes of a row, once per token or head, because
multiplying with a row then needs no broadcast across lanes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.recurrent.layout import LANES


def _column(row: jax.Array) -> jax.Array:
    """Return 128 rows; row i holds lane i of `row`, ``[1, 128]``, in all its lanes."""
    return jnp.broadcast_to(row, (LANES, LANES)).T


def begin_scan(tokens, out, scratch):
    """Transpose B and C into columns in scratch, ``[groups, n, 128]`` each, and clear the output."""
    for given, columns in zip(tokens[2:], scratch, strict=True):
        groups, n, _ = columns.shape
        tiles = n // LANES
        for group in range(groups):
            for tile in range(tiles):
                columns[group, pl.ds(tile * LANES, LANES)] = _column(given[0, pl.ds(group * tiles + tile, 1)])
    out[...] = jnp.zeros(out.shape, out.dtype)


def update_scan(piece, number, tokens, constants, out, scratch, *, states, rows, groups, span):
    """Update `states` numbers of each channel: a piece has `states` times `rows` rows, and a row is 128 channels.

    tokens: decays (steps, if constants hold rates), inputs, B, C.
    """
    decays, inputs, _, _ = tokens
    of_b, of_c = scratch
    # Spans of channels outside: their decays, inputs and outputs stay in registers over all states of the piece.
    for first in range(0, rows, span):
        channels, group = pl.ds(first, span), first // (rows // groups)
        decay, given, y = decays[0, channels], inputs[0, channels], out[0, channels]
        for state in range(states):
            n = number * states + state
            kept = jnp.exp(decay * constants[0][n, channels]) if constants else decay
            own = pl.ds(n, 1)
            value = kept * piece.read(state * rows + first, span) + of_b[group, own] * given
            y += of_c[group, own] * value
            piece.write(state * rows + first, value)
        out[0, channels] = y


def begin_delta(tokens, out, scratch):
    """Do nothing: a head's output is written once."""


def update_delta(piece, number, tokens, constants, out, scratch, *, heads, size):
    """Update some heads: a head's state is [size, 128], keys down and values across.

    tokens: queries, keys, values, decays, rates, one row per head.
    """
    queries, keys, values, decays, rates = tokens
    for nth in range(heads):
        head = pl.ds(number * heads + nth, 1)
        key, query = (_column(of[0, head])[:size] for of in (keys, queries))
        state = decays[0, head] * piece.read(nth * size, size)
        said = jnp.sum(key * state, axis=0, keepdims=True)
        state += key * (rates[0, head] * (values[0, head] - said))
        piece.write(nth * size, state)
        out[0, head] = jnp.sum(query * state, axis=0, keepdims=True)


def begin_conv(tokens, out, scratch):
    """Do nothing: the output is written once."""


def update_conv(piece, number, tokens, constants, out, scratch, *, width, silu):
    """Convolve, and move the inputs by one. tokens: inputs; constants: weights [width, rows, 128], offset [rows, 128];
    scratch: the state, whose parts begin anywhere in a tile."""
    (inputs,), (weights, offset), (window,) = tokens, constants, scratch
    # A tap has `rows` rows, which need not be whole tiles. The state goes through float32 scratch, where slices may
    # begin at any row; the ring's buffer is read and written whole.
    rows, given = offset.shape[0], inputs[0]
    window[...] = piece.read(0, window.shape[0])
    y = offset[...] + weights[width - 1] * given
    taps = [window[pl.ds(tap * rows, rows)] for tap in range(width - 1)]
    for tap, before in enumerate(taps):
        y += weights[tap] * before
    for tap, then in enumerate([*taps[1:], given]):
        window[pl.ds(tap * rows, rows)] = then
    piece.write(0, window[...])
    out[0] = y * jax.nn.sigmoid(y) if silu else y
