"""Lays out the rows of a batch for the TPU kernel: queries before a launch, and results within it.

A prompt's queries are multiplied chunk by chunk, a head's rows one after another. Results of a batch with prompts are
written in the layout that the next matrix product reads, a token's heads side by side in one row: converting any other
layout took XLA three operations and a tenth of a layer. In that layout a row is a part of a register, so both launches
write blocks of whole registers and keep the rows in them that are not their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

BLOCK_ROWS = 16
"""Rows of the batch in whole registers of bfloat16. A decode writes a block of so many, to change one of its rows."""


class Tile(NamedTuple):
    """Describes how a launch cuts the rows of a batch; both fields are powers of two.

    Attributes:
        chunk: rows whose queries are multiplied at once, so that a row's place in it is its low bits.
        chunks: chunks of a tile, which share the KV that is read.
    """

    chunk: int
    chunks: int

    @property
    def tokens(self) -> int:
        """Return the rows of the batch in a tile."""
        return self.chunk * self.chunks

    @property
    def fills_registers(self) -> bool:
        """Tell whether a chunk's results are whole registers of a batch's rows."""
        return self.chunk % BLOCK_ROWS == 0


ONE_ROW = Tile(1, 1)


def in_chunks(
    q: Float[Array, "tokens kv_heads q_per_kv lanes"], tile: Tile
) -> Float[Array, "chunks kv_heads rows lanes"]:
    """Return the queries of whole tiles, chunk by chunk, row = group member * chunk + place."""
    tokens, kv_heads, group, lanes = q.shape
    if tile == ONE_ROW:
        return q
    q = jnp.pad(q, ((0, -tokens % tile.tokens), (0, 0), (0, 0), (0, 0)))
    q = q.reshape(-1, tile.chunk, kv_heads, group, lanes).transpose(0, 2, 3, 1, 4)
    return q.reshape(-1, kv_heads, group * tile.chunk, lanes)


def in_rows(out: Float[Array, "chunks kv_heads rows lanes"], tile: Tile, group: int) -> Array:
    """Undo `in_chunks`: [rows of whole tiles, kv_heads, q_per_kv, lanes]."""
    if tile == ONE_ROW:
        return out
    _, kv_heads, _, lanes = out.shape
    out = out.reshape(-1, kv_heads, group, tile.chunk, lanes).transpose(0, 3, 1, 2, 4)
    return out.reshape(-1, kv_heads, group, lanes)


def write_side_by_side(
    out: Any,
    rows: Any,
    result: Float[Array, "heads group_and_place lanes"],
    own: Bool[Array, "rows 1"],
    places: int,
) -> None:
    """Write a chunk's results, or those of a row, into `out`, VMEM [rows of a tile, heads * group * lanes].

    Args:
        rows: those of `out` that are written.
        result: row = group member * places + place.
        own: the rows that are written; the others keep their values. With one place, all of `own` get its result.
    """
    heads, count, lanes = result.shape
    group = count // places
    for member in range(heads * group):
        first = (member % group) * places
        part = result[member // group, first : first + places]
        columns = slice(member * lanes, (member + 1) * lanes)
        out[rows, columns] = jnp.where(own, part, out[rows, columns].astype(part.dtype)).astype(out.dtype)
