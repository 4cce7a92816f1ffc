"""Makes the TPU kernel's work lists: which queries and which pages each grid step takes.

A *tile* is a fixed number of consecutive rows of the batch, of any sequences; a *unit* is one sequence's part of it.
So queries are read from the batch in place, and no unit gathers them. All of a unit's keys lie in one range of logical
pages: pages before its window or chunk, or past its last query, are never touched.

    rows of the batch   a a a a a b c c | c c c c c c d d     '|' ends a tile of 8 rows
    units               |---0----|1|-2--|------3-----|-4-|

A prompt's queries are multiplied chunk by chunk, a head's rows one after another. Results of a batch with prompts are
written in the layout that the next matrix product reads, a token's heads side by side in one row: converting any other
layout took XLA three operations and a tenth of a layer. In that layout a row is a part of a register, so both launches
write blocks of whole registers and keep the rows in them that are not their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.paged_attention.reference import Reach

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


class Units(NamedTuple):
    """Lists the units, live ones first, by ascending tile; each field is a row of one array, indexed by unit. Positions
    are token positions within the sequence."""

    num_units: Any
    """The number of live units, repeated for each unit; the kernel reads entry 0."""
    tile: Any
    """The tile of the batch's rows that holds the unit."""
    first: Any
    """Place in the tile of the unit's first query."""
    stop: Any
    """One past the place in the tile of the unit's last query."""
    query_pos: Any
    """Position of the tile's first row, counted in the unit's sequence; negative if the sequence begins after it."""
    seq: Any
    """The sequence, a row of the block tables."""
    entry: Any
    """Index of the first page in the kernel's block tables: in all tables, flattened, or in the sequence's own."""
    num_pages: Any
    """Pages that hold a key some query sees."""
    first_key: Any
    """Position of the first page's first key, seen or not."""
    key_start: Any
    """First key any query sees."""
    key_stop: Any
    """One past the last key any query sees."""
    broken: Any
    """1 if a page that some query of the sequence sees has no block."""

    @classmethod
    def of(cls, work: Any) -> Units:
        """Return the fields of a list that lies in scalar memory, ``[fields, units]``."""
        return cls(*(_Row(work, number) for number in range(len(cls._fields))))


@dataclass(frozen=True)
class _Row:
    """Reads a row of a reference."""

    work: Any
    number: int

    def __getitem__(self, unit: Any) -> Any:
        return self.work[self.number, unit]

    def __len__(self) -> int:
        return self.work.shape[1]


def max_units(tokens: int, seqs: int, tile: int) -> int:
    """Return the most units that sequences of two queries or more have: one each, and one for each end of a tile."""
    return max(1, min(seqs, tokens // 2) - 1 + -(-tokens // tile))


def cut_into_units(
    query_starts: Int[Array, " seqs+1"],
    kv_lens: Int[Array, " seqs"],
    broken: Int[Array, " seqs"],
    taken: Bool[Array, " seqs"],
    *,
    tile: int,
    tiles: int,
    units: int,
    reach: Reach,
    pages: int,
    block_size: int,
    whole_tables: bool,
    last_keys: Int[Array, " rows"] | None = None,
) -> Int[Array, "fields units"]:
    """Cut some sequences of the batch into units; returns the fields of `Units`.

    Args:
        taken: the sequences that are cut.
        tile: rows of a tile.
        tiles: tiles of the batch.
        units: length of the list.
        pages: width of the block tables.
        whole_tables: whether the kernel has all tables flattened, or one sequence's table at a time.
        last_keys: last key that each row of the tiles sees; None = its own.
    """
    starts, stops = query_starts[:-1], query_starts[1:]
    counts = jnp.where(taken, (stops + tile - 1) // tile - starts // tile, 0)
    ends = jnp.cumsum(counts)
    unit = jnp.arange(units, dtype=jnp.int32)
    seq = jnp.minimum(jnp.sum(unit[:, None] >= ends, axis=1), len(kv_lens) - 1)
    at = jnp.clip(starts[seq] // tile + unit - (ends - counts)[seq], 0, tiles - 1)
    first, stop = jnp.maximum(starts[seq] - at * tile, 0), jnp.minimum(stops[seq] - at * tile, tile)
    query_pos = (kv_lens - stops)[seq] + at * tile
    own = query_pos + first
    # At most the query itself: the compiler would compute zeros, which it knows, in each layer anew.
    key_start = jnp.minimum(reach.first_key(own), own)
    key_stop = query_pos + stop
    if last_keys is not None:
        place = jnp.arange(tile)
        mine = (place >= first[:, None]) & (place < stop[:, None])
        seen = jnp.where(mine, last_keys.reshape(tiles, tile)[at], 0)
        key_stop = jnp.maximum(key_stop, jnp.max(seen, axis=1) + 1)
    key_stop = jnp.minimum(key_stop, jnp.minimum(kv_lens[seq], pages * block_size))
    first_page = key_start // block_size
    fields = Units(
        num_units=jnp.broadcast_to(ends[-1], (units,)),
        tile=at,
        first=first,
        stop=stop,
        query_pos=query_pos,
        seq=seq,
        entry=first_page + (seq * pages if whole_tables else 0),
        num_pages=jnp.maximum((key_stop + block_size - 1) // block_size - first_page, 0),
        first_key=first_page * block_size,
        key_start=key_start,
        key_stop=key_stop,
        broken=broken[seq],
    )
    return jnp.stack([field.astype(jnp.int32) for field in fields])


def visit_all_tiles(work: Int[Array, "fields units"], tiles: int) -> Int[Array, "fields units"]:
    """Give the tiles that no live unit is in to the padding units after the live ones, so that the kernel visits every
    tile and zeroes it.

    The list is long enough: its length is tiles plus sequences minus one. Padding units that are left over repeat the
    tile before them.
    """
    units = Units(*work)
    unit, number = jnp.arange(work.shape[1], dtype=jnp.int32), units.num_units[0]
    tile = jnp.arange(tiles, dtype=jnp.int32)
    visited = jnp.any((units.tile == tile[:, None]) & (unit < number), axis=1)
    others = jnp.sort(jnp.where(visited, tiles, tile))
    place = jnp.clip(unit - number, 0, jnp.maximum(jnp.sum(~visited) - 1, 0))
    last = units.tile[jnp.maximum(number - 1, 0)]
    unvisited = jnp.where(jnp.all(visited), last, others[place])
    return jnp.stack(units._replace(tile=jnp.where(unit < number, units.tile, unvisited)))


def check_tables(
    block_tables: Int[Array, "seqs pages"],
    query_starts: Int[Array, " seqs+1"],
    kv_lens: Int[Array, " seqs"],
    blocks: int,
    block_size: int,
    reach: Reach,
) -> tuple[Int[Array, "seqs pages"], Int[Array, " seqs"]]:
    """Return the tables with -1 for ids out of range, and whether a page that some query of the sequence sees has
    one."""
    known = (block_tables >= 0) & (block_tables < blocks)
    page = jnp.arange(block_tables.shape[1])
    first_key = reach.first_key(kv_lens - jnp.diff(query_starts))
    needed = (page >= (first_key // block_size)[:, None]) & (page * block_size < kv_lens[:, None])
    tables = jnp.where(known, block_tables, -1).astype(jnp.int32)
    return tables, jnp.any(needed & ~known, axis=1).astype(jnp.int32)
